"""The service: study definition, worker loop, fleets, report and command line."""
