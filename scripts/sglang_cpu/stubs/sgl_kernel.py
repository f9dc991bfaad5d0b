"""SGLang's CUDA kernels, of which a CPU needs none."""

import missing_on_cpu

missing_on_cpu.stand_in(__name__)
