"""Samplers: a file for each, with its options and how it is built; one that is put here is found."""

from hpsearch.search.discovery import load_modules
from hpsearch.search.samplers.base import SamplerSpec

load_modules(__name__, __path__)

__all__ = ["SamplerSpec"]
