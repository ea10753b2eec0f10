"""Helpers that tests share: none of them is a test, and all of them are imported from here."""
