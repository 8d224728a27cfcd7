"""Doctor: what a worker on this machine needs, checked one thing after the other, with a remedy for what fails."""
