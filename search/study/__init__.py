"""Studies: created or joined with their spec, steered, summed up, tidied."""
