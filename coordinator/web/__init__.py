"""The coordinator's HTTP: first contact for newcomers, JSON and events for people, metrics for monitors."""
