"""How to install what an objective imports and is not there."""

from __future__ import annotations

import os
import sys

# Where the package that brings a module has another name than the module.
_PACKAGES = {
    "Bio": "biopython",
    "PIL": "pillow",
    "attr": "attrs",
    "bs4": "beautifulsoup4",
    "cv2": "opencv-python-headless",  # the other one needs the libraries of a desktop
    "dateutil": "python-dateutil",
    "faiss": "faiss-cpu",
    "hydra": "hydra-core",
    "open_clip": "open_clip_torch",
    "skimage": "scikit-image",
    "sklearn": "scikit-learn",
    "umap": "umap-learn",
    "yaml": "pyyaml",
}

# Packages of hpsearch before it had one namespace; objectives of that time import from them.
_FORMER = {"objectives", "search", "storage"}


def how_to_install(error: BaseException) -> str:
    """How to install the module that is not there, in brackets; nothing for other errors.

    A part of a package that is there is a mistake of another kind, and so is a module of Python's own.
    """
    module = error.name if isinstance(error, ModuleNotFoundError) else None
    if not module or "." in module or module in sys.stdlib_module_names:
        return ""
    if module in _FORMER:
        return " (the classes of hpsearch: `from hpsearch import Objective, Splits, TrainConfig`)"
    return f" (where it is a package: `{installing(_PACKAGES.get(module, module))}`)"


def installing(package: str) -> str:
    """The command that installs a package beside hpsearch."""
    wrapper = os.environ.get("HPSEARCH_COMMAND")  # what the user calls; not set where hpsearch is a wheel
    return f"{wrapper} add {package}" if wrapper else f"pip install {package}"
