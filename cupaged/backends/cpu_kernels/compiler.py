"""From the source of an operation to a file of machine code for this processor, which cpu_code.py maps.

Numba makes optimised LLVM IR of an operation and all that it calls. Here everything that only serves Python is cut away and
the rest is compiled as one object without references to the outside. Where cpu_code maps images it is linked to one
(image.py); elsewhere the object itself is kept, and LLVM loads it.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import llvmlite.binding as llvm

from cupaged.backends.cpu_code import ENTRY, MAPS_IMAGES, OPERATIONS, code_file
from cupaged.backends.cpu_kernels.image import link
from cupaged.backends.cpu_kernels.jit import Operation

_ADDED = """
declare i32 @"{function}"(ptr, ptr, i64, i64)

define void @{entry}(i64 %member, i64 %operation) {{
  %result = alloca ptr
  %error = alloca ptr
  %status = call i32 @"{function}"(ptr %result, ptr %error, i64 %member, i64 %operation)
  ret void
}}

define void @NRT_MemInfo_call_dtor(ptr %owner) {{
  ret void
}}

define hidden ptr @memset(ptr %to, i32 %value, i64 %count) "no-builtins" {{
  %byte = trunc i32 %value to i8
  %one = insertelement <16 x i8> poison, i8 %byte, i32 0
  %all = shufflevector <16 x i8> %one, <16 x i8> poison, <16 x i32> zeroinitializer
  br label %wide
wide:
  %i = phi i64 [ 0, %0 ], [ %next, %store ]
  %next = add i64 %i, 16
  %fits = icmp ule i64 %next, %count
  br i1 %fits, label %store, label %rest
store:
  %place = getelementptr i8, ptr %to, i64 %i
  store <16 x i8> %all, ptr %place, align 1
  br label %wide
rest:
  %j = phi i64 [ %i, %wide ], [ %after, %last ]
  %more = icmp ult i64 %j, %count
  br i1 %more, label %last, label %done
last:
  %end = getelementptr i8, ptr %to, i64 %j
  store i8 %byte, ptr %end
  %after = add i64 %j, 1
  br label %rest
done:
  ret ptr %to
}}
"""
"""What a program calls, and what compiled code may call beside itself, as no library is there to have it: LLVM memset, and Numba a
function for arrays that have an owner, which those over addresses never have."""


def operation(name: str) -> Operation:
    """The source of `name`: an operation of OPERATIONS, with its number behind a dash where it comes in several."""
    plain, _, number = name.partition("-")
    module = importlib.import_module(f"cupaged.backends.cpu_kernels.{OPERATIONS[plain]}")
    source = getattr(module, plain)
    made: Operation = source(int(number)) if number else source
    return made


def compile_object(source: Operation) -> bytes:
    """A relocatable object with the function ENTRY."""
    text, function = source.module()
    module = llvm.parse_assembly(text)
    module.link_in(llvm.parse_assembly(_ADDED.format(entry=ENTRY, function=function)))
    for value in (*module.functions, *module.global_variables):
        if not value.is_declaration and value.name not in (ENTRY, "memset"):
            value.linkage = "internal"
    machine = _machine()
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options()))
    module.verify()
    return machine.emit_object(module)


def _machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    target = llvm.Target.from_triple(llvm.get_process_triple())
    return target.create_target_machine(cpu=cpu, features=features, opt=3, reloc="pic", codemodel="small")


def compile_to(folder: Path, name: str) -> None:
    """Write the operation's file; whoever looks for it sees all of it or nothing, and every user may read it whom the folder
    lets in. Raises OSError."""
    code = compile_object(operation(name))
    if MAPS_IMAGES:
        code = link(code, ENTRY)
    handle, path = tempfile.mkstemp(dir=folder, prefix=f"{name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(code)
        os.chmod(path, 0o644)
        os.replace(path, code_file(folder, name))
    except BaseException:  # the disk is full, or Ctrl-C
        os.unlink(path)
        raise


def main(arguments: Sequence[str]) -> None:
    """What a compiling process does, given a folder and names. An error's last line on stderr is its reason."""
    folder, *names = arguments
    for name in names:
        compile_to(Path(folder), name)
