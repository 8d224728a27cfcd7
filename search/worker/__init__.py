"""Workers: processes that claim trials and train them."""
