//! One virtual processor in real mode, whose ports are a bus.

use anyhow::{Context as _, Result, bail, ensure};
use kvm_bindings::{KVM_EXIT_IO_IN, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use pio::{Bus, Width};
use vm_memory::{Bytes as _, GuestAddress, GuestMemoryBackend as _, GuestMemoryMmap};

/// The guest has the first 64 KiB of memory, all that real mode reaches with segments of zero.
const MEMORY_BYTES: usize = 64 << 10;
/// Where its code begins.
const CODE: u16 = 0x7c00;
const PAGE_BYTES: usize = 4096;

/// A virtual machine. The fields are dropped in this order: the memory outlives what uses it.
pub(crate) struct Machine {
    processor: VcpuFd,
    /// Keeps the machine.
    _machine: VmFd,
    memory: GuestMemoryMmap,
    scratch: Vec<u8>,
}

impl Machine {
    /// A machine with `code` in its memory; `None` where there is no KVM.
    pub(crate) fn new(code: &[u8]) -> Result<Option<Self>> {
        let Ok(kvm) = Kvm::new() else { return Ok(None) };
        let Ok(machine) = kvm.create_vm() else { return Ok(None) };
        let memory = GuestMemoryMmap::from_ranges(&[(GuestAddress(0), MEMORY_BYTES)])?;
        memory.write_slice(code, GuestAddress(CODE.into()))?;
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: MEMORY_BYTES as u64,
            userspace_addr: memory.get_host_address(GuestAddress(0))? as u64,
        };
        // SAFETY: the region is a mapping of `MEMORY_BYTES` that nobody else writes without vm-memory's volatile accesses.
        // It lives in this struct until after the machine and its processor are closed.
        unsafe { machine.set_user_memory_region(region) }?;
        let processor = machine.create_vcpu(0)?;
        let mut segments = processor.get_sregs()?;
        for segment in [&mut segments.cs, &mut segments.ds, &mut segments.es, &mut segments.ss] {
            (segment.base, segment.selector) = (0, 0);
        }
        processor.set_sregs(&segments)?;
        let mut registers = processor.get_regs()?;
        // Bit 1 of the flags is always set.
        (registers.rip, registers.rflags) = (CODE.into(), 2);
        processor.set_regs(&registers)?;
        Ok(Some(Self { processor, _machine: machine, memory, scratch: Vec::new() }))
    }

    /// Runs the guest until it halts, and returns how often it left for its ports.
    pub(crate) fn run(&mut self, bus: &mut Bus) -> Result<u64> {
        let mut exits = 0;
        loop {
            match self.processor.run()? {
                VcpuExit::IoIn(..) | VcpuExit::IoOut(..) => self.serve(bus)?,
                VcpuExit::Hlt => return Ok(exits),
                other => bail!("the guest left with {other:?}"),
            }
            exits += 1;
        }
    }

    /// What the guest has at `address`.
    #[allow(dead_code, reason = "for the test")]
    pub(crate) fn read_memory(&self, address: u16, length_bytes: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; length_bytes];
        self.memory.read_slice(&mut bytes, GuestAddress(address.into()))?;
        Ok(bytes)
    }

    /// Carries out the access that the guest has left for: one, or several of a string.
    fn serve(&mut self, bus: &mut Bus) -> Result<()> {
        let run = self.processor.get_kvm_run();
        // SAFETY: the last exit was for a port, so this is the member of the union that the kernel wrote. All its fields are
        // integers.
        let access = unsafe { run.__bindgen_anon_1.io };
        let width = Width::of_bytes(access.size.into()).context("no processor has such a width")?;
        let length = width.bytes() * access.count as usize;
        let start = usize::try_from(access.data_offset)?;
        // The kernel keeps the data in a page of its own, behind the one with the exit.
        ensure!(start >= PAGE_BYTES && length <= PAGE_BYTES, "{length} bytes at {start}");
        let data = std::ptr::from_mut(run).cast::<u8>().wrapping_add(start);
        self.scratch.resize(length, 0);
        if u32::from(access.direction) == KVM_EXIT_IO_IN {
            bus.read_string(access.port, width, &mut self.scratch);
            // SAFETY: `data` is in the mapping that the kernel shares with this process for the processor, `length` bytes
            // of it are the access's by the kernel's word, and the processor does not run meanwhile.
            unsafe { data.copy_from_nonoverlapping(self.scratch.as_ptr(), length) };
        } else {
            // SAFETY: as above.
            unsafe { self.scratch.as_mut_ptr().copy_from_nonoverlapping(data, length) };
            bus.write_string(access.port, width, &self.scratch);
        }
        Ok(())
    }
}
