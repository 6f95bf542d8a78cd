"""Encoded planes and the outer compression stage."""
