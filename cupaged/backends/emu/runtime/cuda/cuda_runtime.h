// Stands for CUDA's header of this name: simt.h, which is in front of every kernel, has its contents.
