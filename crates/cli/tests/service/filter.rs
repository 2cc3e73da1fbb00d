//! The unit's restrictions of system calls, as programs for the kernel's seccomp filters. systemd makes the same of them.

use crate::common::tool_ok;
use crate::unit::Unit;
use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
};
use std::collections::{BTreeMap, BTreeSet};

const EPERM: u32 = 1;
const ENOSYS: u32 = 38;
const EAFNOSUPPORT: u32 = 97;
const AF_UNIX: u64 = 1;
const PROT_WRITE: u64 = 2;
const PROT_EXEC: u64 = 4;
const SHM_EXEC: u64 = 0o100_000;
/// Set-user and set-group bits of a mode.
const SUID_SGID: u64 = 0o6000;
/// Each kind of namespace that `clone` and `unshare` can make.
const NAMESPACES: u64 = 0x7e02_0080;
/// `personality` only tells what is.
const PERSONALITY_QUERY: u64 = 0xffff_ffff;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// A filter for each error that calls end with. All of them have to let a call pass.
pub(crate) fn of_unit(unit: &Unit) -> Vec<Vec<u8>> {
    let numbers = numbers();
    let number = |name: &str| numbers.get(name).copied();
    let error = unit.value("SystemCallErrorNumber");
    assert_eq!(error, "EPERM");
    let mut allowed: Rules =
        allowed_names(unit).iter().filter_map(|name| number(name)).map(|nr| (nr, vec![])).collect();
    let mut only_if = |name: &str, rules: Vec<SeccompRule>| {
        if let Some(allowed) = number(name).and_then(|number| allowed.get_mut(&number)) {
            *allowed = rules;
        }
    };
    if unit.is_on("MemoryDenyWriteExecute") {
        let not_both = [0, PROT_WRITE, PROT_EXEC].map(|bits| masked(2, PROT_WRITE | PROT_EXEC, bits));
        only_if("mmap", not_both.into());
        only_if("mprotect", vec![masked(2, PROT_EXEC, 0)]);
        only_if("pkey_mprotect", vec![masked(2, PROT_EXEC, 0)]);
        only_if("shmat", vec![masked(2, SHM_EXEC, 0)]);
    }
    if unit.is_on("RestrictSUIDSGID") {
        only_if("chmod", vec![masked(1, SUID_SGID, 0)]);
        only_if("fchmod", vec![masked(1, SUID_SGID, 0)]);
        only_if("fchmodat", vec![masked(2, SUID_SGID, 0)]);
    }
    if unit.is_on("RestrictNamespaces") {
        only_if("clone", vec![masked(0, NAMESPACES, 0)]);
        only_if("unshare", vec![masked(0, NAMESPACES, 0)]);
    }
    if unit.is_on("LockPersonality") {
        only_if("personality", vec![masked(0, u64::MAX, 0), masked(0, u64::MAX, PERSONALITY_QUERY)]);
    }
    // Its only use in the list is for what `RestrictRealtime` forbids.
    assert!(
        unit.is_on("RestrictRealtime") && unit.values("SystemCallFilter").iter().any(|set| set.contains("@resources"))
    );
    let mut filters = vec![compiled(allowed, SeccompAction::Errno(EPERM), SeccompAction::Allow)];
    if unit.is_on("RestrictNamespaces") {
        // Its flags are in memory, which no filter sees. Whoever gets this error calls `clone`.
        let rules = number("clone3").map(|number| (number, vec![])).into_iter().collect();
        filters.push(compiled(rules, SeccompAction::Allow, SeccompAction::Errno(ENOSYS)));
    }
    assert_eq!(unit.value("RestrictAddressFamilies"), "AF_UNIX");
    let rule = SeccompRule::new(vec![condition(0, SeccompCmpOp::Ne, AF_UNIX)]).unwrap();
    let rules = number("socket").map(|number| (number, vec![rule])).into_iter().collect();
    filters.push(compiled(rules, SeccompAction::Allow, SeccompAction::Errno(EAFNOSUPPORT)));
    filters.iter().map(bytes).collect()
}

fn condition(argument: u8, operator: SeccompCmpOp, value: u64) -> SeccompCondition {
    SeccompCondition::new(argument, SeccompCmpArgLen::Dword, operator, value).unwrap()
}

fn masked(argument: u8, mask: u64, value: u64) -> SeccompRule {
    let mask = mask & u64::from(u32::MAX);
    SeccompRule::new(vec![condition(argument, SeccompCmpOp::MaskedEq(mask), value)]).unwrap()
}

/// Other architectures' calls end the process: `SystemCallArchitectures=native`.
fn compiled(rules: Rules, otherwise: SeccompAction, found: SeccompAction) -> BpfProgram {
    let architecture = TargetArch::try_from(std::env::consts::ARCH).unwrap();
    SeccompFilter::new(rules, otherwise, found, architecture).unwrap().try_into().unwrap()
}

/// As the kernel takes them: `struct sock_filter`, one after the other.
fn bytes(program: &BpfProgram) -> Vec<u8> {
    let instruction = |filter: &seccompiler::sock_filter| {
        let mut bytes = filter.code.to_ne_bytes().to_vec();
        bytes.extend([filter.jt, filter.jf]);
        bytes.extend(filter.k.to_ne_bytes());
        bytes
    };
    program.iter().flat_map(instruction).collect()
}

/// The names that `SystemCallFilter=` lets pass: sets are named with `@`, and a line that begins with `~` takes away.
fn allowed_names(unit: &Unit) -> BTreeSet<String> {
    let sets = sets();
    let mut allowed = BTreeSet::new();
    for line in unit.values("SystemCallFilter") {
        let (takes_away, words) = line.strip_prefix('~').map_or((false, line), |words| (true, words));
        for word in words.split_whitespace() {
            let names = expanded(&sets, word);
            match takes_away {
                true => allowed.retain(|name| !names.contains(name)),
                false => allowed.extend(names),
            }
        }
    }
    assert!(allowed.len() > 100, "{allowed:?}");
    allowed
}

fn expanded(sets: &BTreeMap<String, Vec<String>>, word: &str) -> BTreeSet<String> {
    match sets.get(word) {
        Some(members) => members.iter().flat_map(|member| expanded(sets, member)).collect(),
        None => std::iter::once(word.to_owned()).collect(),
    }
}

/// systemd's own sets.
fn sets() -> BTreeMap<String, Vec<String>> {
    let mut sets: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut set = None;
    for line in tool_ok("systemd-analyze", &["--no-pager", "syscall-filter"]).lines() {
        let word = line.trim();
        match line.starts_with('@') {
            true => set = Some(sets.entry(word.to_owned()).or_default()),
            false if word.is_empty() || word.starts_with('#') => {}
            false => set.iter_mut().for_each(|set| set.push(word.to_owned())),
        }
    }
    sets
}

/// Each call's number, as the C compiler knows it.
fn numbers() -> BTreeMap<String, i64> {
    let macros = tool_ok("cc", &["-E", "-dM", "-include", "sys/syscall.h", "-x", "c", "/dev/null"]);
    let named = macros.lines().filter_map(|line| line.strip_prefix("#define __NR_")?.split_once(' '));
    let numbers: BTreeMap<_, _> =
        named.filter_map(|(name, number)| Some((name.to_owned(), number.trim().parse().ok()?))).collect();
    assert!(numbers.contains_key("read"), "{macros}");
    numbers
}
