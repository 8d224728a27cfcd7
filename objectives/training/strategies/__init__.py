"""How one model trains on several devices, a module for each way."""
