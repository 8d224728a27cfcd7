"""Commands that run trials on this machine: search, finalists, refit, live view, and upload of remaining records."""
