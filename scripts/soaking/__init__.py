"""Long, seeded proofs that are too long for the tests."""
