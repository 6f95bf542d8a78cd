"""Adapters to what runs the weights."""
