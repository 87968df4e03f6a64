"""CUDA C sources of cupaged's kernels. The kernels themselves arrive with the GPU part; see README, limitations."""
