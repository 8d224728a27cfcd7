"""Signals, exits and child processes of hpsearch processes."""
