"""Rungs: pause trials, and promote the best trials, by one metric or by Pareto fronts."""
