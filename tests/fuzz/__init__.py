"""Hostile input: small valid objects, mutators that know their structure, and what must hold."""
