//! A copy that fails instead of waiting for a page of an armed mapping (see [`crate::Mapping::arm`]).
//!
//! The kernel answers a touch of such a page with SIGBUS. The handler (see [`crate::fault`]) must be able to go on from
//! whatever instruction touched it, so the copy is written in machine language: it keeps nothing on the stack, and from
//! all of it its failing exit can be gone to. A touch of any other memory is treated as everywhere: the handler repairs
//! the page, and the instruction is repeated.

/// Whether there is such a copy on this machine.
pub const CAN_FAIL: bool = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));

#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".pushsection .text.ringdisk_try_copy,\"ax\",@progbits",
    ".p2align 6",
    ".globl ringdisk_try_copy",
    ".hidden ringdisk_try_copy",
    ".type ringdisk_try_copy,@function",
    "ringdisk_try_copy:", // rdi: to, rsi: from, rdx: bytes
    ".cfi_startproc",
    "cmp rdx, 64",
    "jb 3f",
    ".p2align 5",
    "2:",
    "movups xmm0, [rsi]",
    "movups xmm1, [rsi + 16]",
    "movups xmm2, [rsi + 32]",
    "movups xmm3, [rsi + 48]",
    "add rsi, 64",
    "movups [rdi], xmm0",
    "movups [rdi + 16], xmm1",
    "movups [rdi + 32], xmm2",
    "movups [rdi + 48], xmm3",
    "add rdi, 64",
    "sub rdx, 64",
    "cmp rdx, 64",
    "jae 2b",
    "3:",
    "test dl, 32",
    "jz 4f",
    "movups xmm0, [rsi]",
    "movups xmm1, [rsi + 16]",
    "movups [rdi], xmm0",
    "movups [rdi + 16], xmm1",
    "add rsi, 32",
    "add rdi, 32",
    "4:",
    "test dl, 16",
    "jz 5f",
    "movups xmm0, [rsi]",
    "movups [rdi], xmm0",
    "add rsi, 16",
    "add rdi, 16",
    "5:",
    "test dl, 8",
    "jz 6f",
    "mov rax, [rsi]",
    "mov [rdi], rax",
    "add rsi, 8",
    "add rdi, 8",
    "6:",
    "test dl, 4",
    "jz 7f",
    "mov eax, [rsi]",
    "mov [rdi], eax",
    "add rsi, 4",
    "add rdi, 4",
    "7:",
    "test dl, 2",
    "jz 8f",
    "movzx eax, word ptr [rsi]",
    "mov [rdi], ax",
    "add rsi, 2",
    "add rdi, 2",
    "8:",
    "test dl, 1",
    "jz 9f",
    "movzx eax, byte ptr [rsi]",
    "mov [rdi], al",
    "9:",
    "mov eax, 1",
    "ret",
    ".globl ringdisk_try_copy_failed",
    ".hidden ringdisk_try_copy_failed",
    "ringdisk_try_copy_failed:",
    "xor eax, eax",
    "ret",
    ".cfi_endproc",
    ".size ringdisk_try_copy, . - ringdisk_try_copy",
    ".popsection",
);

#[cfg(target_arch = "aarch64")]
core::arch::global_asm!(
    ".pushsection .text.ringdisk_try_copy,\"ax\",@progbits",
    ".p2align 6",
    ".globl ringdisk_try_copy",
    ".hidden ringdisk_try_copy",
    ".type ringdisk_try_copy,@function",
    "ringdisk_try_copy:", // x0: to, x1: from, x2: bytes
    ".cfi_startproc",
    "hint #34", // bti c
    "cmp x2, #64",
    "b.lo 3f",
    "2:",
    "ldp q0, q1, [x1]",
    "ldp q2, q3, [x1, #32]",
    "add x1, x1, #64",
    "stp q0, q1, [x0]",
    "stp q2, q3, [x0, #32]",
    "add x0, x0, #64",
    "sub x2, x2, #64",
    "cmp x2, #64",
    "b.hs 2b",
    "3:",
    "tbz x2, #5, 4f",
    "ldp q0, q1, [x1]",
    "stp q0, q1, [x0]",
    "add x1, x1, #32",
    "add x0, x0, #32",
    "4:",
    "tbz x2, #4, 5f",
    "ldr q0, [x1]",
    "str q0, [x0]",
    "add x1, x1, #16",
    "add x0, x0, #16",
    "5:",
    "tbz x2, #3, 6f",
    "ldr x3, [x1]",
    "str x3, [x0]",
    "add x1, x1, #8",
    "add x0, x0, #8",
    "6:",
    "tbz x2, #2, 7f",
    "ldr w3, [x1]",
    "str w3, [x0]",
    "add x1, x1, #4",
    "add x0, x0, #4",
    "7:",
    "tbz x2, #1, 8f",
    "ldrh w3, [x1]",
    "strh w3, [x0]",
    "add x1, x1, #2",
    "add x0, x0, #2",
    "8:",
    "tbz x2, #0, 9f",
    "ldrb w3, [x1]",
    "strb w3, [x0]",
    "9:",
    "mov x0, #1",
    "ret",
    ".globl ringdisk_try_copy_failed",
    ".hidden ringdisk_try_copy_failed",
    "ringdisk_try_copy_failed:",
    "mov x0, #0",
    "ret",
    ".cfi_endproc",
    ".size ringdisk_try_copy, . - ringdisk_try_copy",
    ".popsection",
);

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod machine {
    unsafe extern "C" {
        pub(super) fn ringdisk_try_copy(to: *mut u8, from: *const u8, length_bytes: usize) -> usize;
        /// Not a function: where the one above goes on after a touch that failed.
        fn ringdisk_try_copy_failed();
    }

    /// Where the copy goes on, if `counter` is an instruction of its own that comes before.
    fn failing_exit(counter: usize) -> Option<usize> {
        let start = ringdisk_try_copy as *const () as usize;
        let exit = ringdisk_try_copy_failed as *const () as usize;
        (start..exit).contains(&counter).then_some(exit)
    }

    /// See [`super::fail`].
    pub(super) unsafe fn fail(context: *mut libc::c_void) -> bool {
        // SAFETY: the caller passes the context of a signal handler, which is a `ucontext_t`.
        let machine = unsafe { &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext };
        #[cfg(target_arch = "x86_64")]
        let counter = &mut machine.gregs[libc::REG_RIP as usize];
        #[cfg(target_arch = "aarch64")]
        let counter = &mut machine.pc;
        match failing_exit(*counter as usize) {
            Some(exit) => {
                *counter = exit as _;
                true
            }
            None => false,
        }
    }
}

/// Copies as `std::ptr::copy` does, but that the ranges may not overlap. False, with any part of it copied, where a page of
/// an armed mapping could not be had at once.
///
/// # Safety
/// Both ranges must be mapped, `from` to be read and `to` to be written, or be such that the handler repairs them. Others
/// may change either meanwhile.
#[must_use]
pub unsafe fn try_copy(from: *const u8, to: *mut u8, length_bytes: usize) -> bool {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    // SAFETY: passed on to the caller; the function follows the C calling convention.
    return unsafe { machine::ringdisk_try_copy(to, from, length_bytes) } != 0;
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        // SAFETY: passed on to the caller.
        unsafe { std::ptr::copy(from, to, length_bytes) };
        true
    }
}

/// For the handler: if a copy of ours is what was interrupted, has it fail when the handler returns.
///
/// # Safety
/// `context` must be what the kernel has passed to the handler.
pub(crate) unsafe fn fail(context: *mut libc::c_void) -> bool {
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    // SAFETY: passed on to the caller.
    return unsafe { machine::fail(context) };
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        let _ = context;
        false
    }
}
