"""The codec benchmark: payloads before and after the outer stage, on a proxy and on real masks."""
