"""A proxy that forwards an HTTP request to its end and then hangs up instead of answering."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Given a request's head, whether its answer gets lost.
Loses = Callable[[bytes], bool]


class Proxy:
    """Stands before a server on loopback.

    Attributes:
        url: Address for clients.
        lost: Heads of the requests whose answers were dropped.
    """

    def __init__(self, port: int, loses: Loses) -> None:
        self._server = port
        self._loses = loses
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.lost: list[bytes] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        server = socket.create_connection(("127.0.0.1", self._server))
        drop = threading.Event()
        back = threading.Thread(target=self._answers, args=(server, client, drop), daemon=True)
        back.start()
        with contextlib.suppress(OSError), client, server:
            while data := client.recv(1 << 16):
                head = data.partition(b"\r\n\r\n")[0]
                if head.startswith((b"PUT ", b"POST ")) and self._loses(head):
                    self.lost.append(head)
                    drop.set()
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)
            back.join()

    def _answers(self, server: socket.socket, client: socket.socket, drop: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 16):
                if drop.is_set() and not data.startswith(b"HTTP/1.1 100"):
                    break  # the request has been carried out, and nobody learns it
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Take no more connections."""
        self._listener.close()


@contextmanager
def proxy(port: int, loses: Loses) -> Iterator[Proxy]:
    """A proxy before the server at ``port``."""
    made = Proxy(port, loses)
    try:
        yield made
    finally:
        made.close()


def first(count: int, word: bytes) -> Loses:
    """Lose the answers of the first ``count`` requests whose head has ``word``."""
    left = count

    def loses(head: bytes) -> bool:
        nonlocal left
        if left and word in head.lower():
            left -= 1
            return True
        return False

    return loses
