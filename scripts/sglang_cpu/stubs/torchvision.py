"""For image models; the build on PyPI is for CUDA and does not load beside a CPU build of torch."""

import missing_on_cpu

__version__ = "0.28.0"
missing_on_cpu.stand_in(__name__)
