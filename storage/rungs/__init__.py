"""Rungs: pause trials, and promote the best ones, by one metric or by Pareto fronts."""
