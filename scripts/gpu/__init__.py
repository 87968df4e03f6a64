"""What gpu_check.py and bench_gpu.py are made of. Every part runs on a GPU, and on the emulator in tiny sizes."""
