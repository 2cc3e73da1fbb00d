//! Memory of long requests. Alone in its program, because it counts what the whole process takes from the pool.

mod common;

use common::{Client, Served};
use nbd_wire::numbers::command;
use nbd_wire::reply::Style;
use ringdisk_export_nbd::ServerOptions;

#[test]
fn long_requests_carry_their_data_and_use_their_memory_again() {
    const PIECES: usize = 8;
    let mut served = Served::raw(16 << 20, ServerOptions::default());
    let mut client = Client::connect(&served, Style::Structured, &[]);
    let (offset, length) = (512, (PIECES << 20) - 1024);
    let created = || {
        let pools = memory::pools();
        pools.iter().find(|(name, _)| *name == "buffer of 1048576 bytes").map_or(0, |(_, stats)| stats.created)
    };
    let mut round = |number: usize| {
        let data: Vec<u8> = (0..length).map(|index| ((index + number) % 251) as u8).collect();
        client.send(command::WRITE, 0, offset, length as u64, &data);
        client.reply();
        client.send(command::READ, 0, offset, length as u64, &[]);
        assert!(client.reply().2[8..] == data, "in round {number}");
    };
    round(0);
    let after_first = created();
    assert!(after_first >= PIECES as u64, "{after_first} pieces");
    (1..=8).for_each(&mut round);
    assert!(created() < after_first + PIECES as u64, "{after_first}, then {}", created());
    drop(client);
    served.stop();
}
