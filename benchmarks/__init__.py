"""Measurements that go into the docs. ``nox -s bench`` runs them; they are no tests."""
