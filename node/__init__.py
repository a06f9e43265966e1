"""Take part in a run: the agent, its trainer, and the observer."""
