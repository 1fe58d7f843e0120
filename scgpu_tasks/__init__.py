"""Out-of-core single-cell steps on CPUs and GPUs: convert, check, load, QC, PCA."""

__version__ = "0.1.0"
