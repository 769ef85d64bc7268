"""`python -m benchmarks.lint_kernels`: compiles every kernel for several GPUs and checks the figures."""
