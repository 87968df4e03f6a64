// Switching stacks. `simt_switch` saves the registers that a called function must keep on the running stack, stores the
// stack pointer and continues on another stack; a new stack is laid out so that the first switch to it enters a function.
// Fifteen instructions for x86-64 and aarch64; ucontext, ten times as slow for its system call, for everything else.
#pragma once
#include <stdint.h>

#if !defined(CUPAGED_EMU_UCONTEXT) && (defined(__x86_64__) || defined(__aarch64__))
extern "C" void simt_switch(void** save, void* to);
#define SIMT_FUNCTION(body) asm(".text\n.p2align 4\n.hidden simt_switch\n.globl simt_switch\nsimt_switch:\n" body)
#else
#include <ucontext.h>
#endif

namespace simt {
#if defined(CUPAGED_EMU_UCONTEXT) || !(defined(__x86_64__) || defined(__aarch64__))

static inline void switch_stack(void** save, void* to) {
  ucontext_t here;
  *save = &here;
  swapcontext(&here, (ucontext_t*)to);
}
static void* new_stack(char* low, char* top, void (*entry)()) {
  top -= (sizeof(ucontext_t) + 63) & ~(size_t)63;
  ucontext_t* context = (ucontext_t*)((uintptr_t)top & ~(uintptr_t)63);
  getcontext(context);
  context->uc_stack.ss_sp = low;
  context->uc_stack.ss_size = (size_t)((char*)context - low);
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}

#elif defined(__x86_64__)

SIMT_FUNCTION(
    "pushq %rbp\n pushq %rbx\n pushq %r12\n pushq %r13\n pushq %r14\n pushq %r15\n"
    "movq %rsp, (%rdi)\n movq %rsi, %rsp\n"
    "popq %r15\n popq %r14\n popq %r13\n popq %r12\n popq %rbx\n popq %rbp\n"
    "popq %rcx\n jmpq *%rcx\n");
static inline void switch_stack(void** save, void* to) { simt_switch(save, to); }
static void* new_stack(char*, char* top, void (*entry)()) {
  void** stack = (void**)((uintptr_t)top & ~(uintptr_t)15);
  *--stack = nullptr;  // where a caller's return address would be: entry finds the alignment that a call leaves
  *--stack = (void*)entry;
  for (int saved = 0; saved < 6; saved++) *--stack = nullptr;
  return stack;
}

#else  // aarch64

SIMT_FUNCTION(
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp, #0]\n stp x21, x22, [sp, #16]\n stp x23, x24, [sp, #32]\n stp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\n stp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\n stp d10, d11, [sp, #112]\n stp d12, d13, [sp, #128]\n stp d14, d15, [sp, #144]\n"
    "mov x9, sp\n str x9, [x0]\n mov sp, x1\n"
    "ldp x19, x20, [sp, #0]\n ldp x21, x22, [sp, #16]\n ldp x23, x24, [sp, #32]\n ldp x25, x26, [sp, #48]\n"
    "ldp x27, x28, [sp, #64]\n ldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\n ldp d10, d11, [sp, #112]\n ldp d12, d13, [sp, #128]\n ldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\n ret\n");
static inline void switch_stack(void** save, void* to) { simt_switch(save, to); }
static void* new_stack(char*, char* top, void (*entry)()) {
  void** stack = (void**)((uintptr_t)top & ~(uintptr_t)15) - 20;
  for (int saved = 0; saved < 20; saved++) stack[saved] = nullptr;
  stack[11] = (void*)entry;  // x30, the link register
  return stack;
}

#endif
}  // namespace simt
