//! A copy that fails instead of waiting for a page of an armed mapping (see [`crate::Mapping::arm`]).
//!
//! The kernel answers a touch of such a page with SIGBUS. The copy is the C library's, as any other, which knows best how
//! to copy on this machine; but it is called by a few instructions that keep what a function may change, and say where on
//! the stack. The handler (see [`crate::fault`]) has the thread go on there, and the copy, which holds nothing but
//! registers and its part of the stack, is forgotten. A touch of any other memory is treated as everywhere: the handler
//! repairs the page, and the instruction is repeated.

use std::cell::Cell;

/// Whether there is such a copy on this machine.
pub const CAN_FAIL: bool = cfg!(any(target_arch = "x86_64", target_arch = "aarch64"));

#[cfg(target_arch = "x86_64")]
core::arch::global_asm!(
    ".pushsection .text.ringdisk_try_copy,\"ax\",@progbits",
    ".p2align 5",
    ".globl ringdisk_try_copy",
    ".hidden ringdisk_try_copy",
    ".type ringdisk_try_copy,@function",
    "ringdisk_try_copy:", // rdi: to, rsi: from, rdx: bytes, rcx: where to say that a copy is being made
    ".cfi_startproc",
    "push rbx",
    "push rbp",
    "push r12",
    "push r13",
    "push r14",
    "push r15",
    "push rcx",
    ".cfi_def_cfa_offset 64",
    ".cfi_offset rbx, -16",
    ".cfi_offset rbp, -24",
    ".cfi_offset r12, -32",
    ".cfi_offset r13, -40",
    ".cfi_offset r14, -48",
    ".cfi_offset r15, -56",
    "mov rbx, rcx",
    "mov [rcx], rsp",
    "call {memcpy}@PLT",
    "mov qword ptr [rbx], 0",
    "mov eax, 1",
    "2:",
    "pop rcx",
    "pop r15",
    "pop r14",
    "pop r13",
    "pop r12",
    "pop rbp",
    "pop rbx",
    ".cfi_remember_state",
    ".cfi_def_cfa_offset 8",
    "ret",
    ".cfi_restore_state",
    ".globl ringdisk_try_copy_failed",
    ".hidden ringdisk_try_copy_failed",
    "ringdisk_try_copy_failed:",
    "xor eax, eax",
    "jmp 2b",
    ".cfi_endproc",
    ".size ringdisk_try_copy, . - ringdisk_try_copy",
    ".popsection",
    memcpy = sym libc::memcpy,
);

#[cfg(target_arch = "aarch64")]
core::arch::global_asm!(
    ".pushsection .text.ringdisk_try_copy,\"ax\",@progbits",
    ".p2align 5",
    ".globl ringdisk_try_copy",
    ".hidden ringdisk_try_copy",
    ".type ringdisk_try_copy,@function",
    "ringdisk_try_copy:", // x0: to, x1: from, x2: bytes, x3: where to say that a copy is being made
    ".cfi_startproc",
    "hint #34", // bti c
    "stp x29, x30, [sp, #-176]!",
    ".cfi_def_cfa_offset 176",
    ".cfi_offset x29, -176",
    ".cfi_offset x30, -168",
    "mov x29, sp",
    "stp x19, x20, [sp, #16]",
    "stp x21, x22, [sp, #32]",
    "stp x23, x24, [sp, #48]",
    "stp x25, x26, [sp, #64]",
    "stp x27, x28, [sp, #80]",
    "stp d8, d9, [sp, #96]",
    "stp d10, d11, [sp, #112]",
    "stp d12, d13, [sp, #128]",
    "stp d14, d15, [sp, #144]",
    ".cfi_offset x19, -160",
    ".cfi_offset x20, -152",
    "mov x19, x3",
    "mov x9, sp",
    "str x9, [x3]",
    "bl {memcpy}",
    "str xzr, [x19]",
    "mov x0, #1",
    "2:",
    "ldp x19, x20, [sp, #16]",
    "ldp x21, x22, [sp, #32]",
    "ldp x23, x24, [sp, #48]",
    "ldp x25, x26, [sp, #64]",
    "ldp x27, x28, [sp, #80]",
    "ldp d8, d9, [sp, #96]",
    "ldp d10, d11, [sp, #112]",
    "ldp d12, d13, [sp, #128]",
    "ldp d14, d15, [sp, #144]",
    "ldp x29, x30, [sp], #176",
    ".cfi_remember_state",
    ".cfi_def_cfa_offset 0",
    "ret",
    ".cfi_restore_state",
    ".globl ringdisk_try_copy_failed",
    ".hidden ringdisk_try_copy_failed",
    "ringdisk_try_copy_failed:",
    "mov x0, #0",
    "b 2b",
    ".cfi_endproc",
    ".size ringdisk_try_copy, . - ringdisk_try_copy",
    ".popsection",
    memcpy = sym libc::memcpy,
);

thread_local! {
    /// Where on the stack this thread keeps its registers while it makes such a copy; zero while it does not. (The handler
    /// may read it: it is neither made nor dropped.)
    static KEPT_AT: Cell<usize> = const { Cell::new(0) };
}

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
unsafe extern "C" {
    fn ringdisk_try_copy(to: *mut u8, from: *const u8, length_bytes: usize, kept_at: *mut usize) -> usize;
    /// Not a function: where the one above goes on when it fails.
    fn ringdisk_try_copy_failed();
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
    // SAFETY: passed on to the caller; the function follows the C calling convention, also where it fails.
    return KEPT_AT.with(|kept_at| unsafe { ringdisk_try_copy(to, from, length_bytes, kept_at.as_ptr()) } != 0);
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    {
        // SAFETY: passed on to the caller.
        unsafe { std::ptr::copy(from, to, length_bytes) };
        true
    }
}

/// For the handler, where what was interrupted has touched an armed mapping: if that was a copy of ours, has it fail when
/// the handler returns.
///
/// # Safety
/// `context` must be what the kernel has passed to the handler of a fault.
pub(crate) unsafe fn fail(context: *mut libc::c_void) -> bool {
    let kept_at = KEPT_AT.replace(0);
    if kept_at == 0 {
        return false;
    }
    // SAFETY: the caller passes the context of a signal handler, which is a `ucontext_t`. The thread is in the C library's
    // copy, called from where it goes on now, with the stack that it had there.
    #[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
    unsafe {
        let machine = &raw mut (*context.cast::<libc::ucontext_t>()).uc_mcontext;
        let exit = ringdisk_try_copy_failed as *const () as usize;
        #[cfg(target_arch = "x86_64")]
        {
            (*machine).gregs[libc::REG_RSP as usize] = kept_at as _;
            (*machine).gregs[libc::REG_RIP as usize] = exit as _;
        }
        #[cfg(target_arch = "aarch64")]
        {
            (*machine).sp = kept_at as _;
            (*machine).pc = exit as _;
        }
    }
    let _ = context;
    true
}
