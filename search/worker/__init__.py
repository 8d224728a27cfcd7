"""Workers: claim a trial, run it, settle it, take the next."""
