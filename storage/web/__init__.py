"""Access to the web services: the token of an installation, and the rule by which the services accept requests."""
