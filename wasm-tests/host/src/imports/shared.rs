//! Shared data: one memory for all workers.

use wasmtime::{Linker, Result};

use crate::fault::status::OK;
use crate::imports::memory::{hand_over, write};
use crate::imports::{ENV, Host, begin_with};
use crate::world::World;

pub(super) fn define(linker: &mut Linker<World>) -> Result<()> {
    linker.func_wrap(
        ENV,
        "proxy_get_shared_data",
        |mut host: Host<'_>, key: u32, key_size: u32, value: u32, value_size: u32, version: u32| {
            const NAME: &str = "proxy_get_shared_data";
            let key = match begin_with(&mut host, NAME, [(key, key_size)]) {
                Ok([key]) => key,
                Err(status) => return status,
            };
            let world = host.data();
            let got = world.shared.borrow().get(world.personality.shared_data, &key);
            match got {
                Ok((bytes, found)) => match hand_over(&mut host, NAME, &bytes, value, value_size) {
                    OK => write(&mut host, NAME, version, &found.to_le_bytes()),
                    status => status,
                },
                Err(status) => status,
            }
        },
    )?;
    linker.func_wrap(
        ENV,
        "proxy_set_shared_data",
        |mut host: Host<'_>, key: u32, key_size: u32, value: u32, value_size: u32, version: u32| {
            let pieces = [(key, key_size), (value, value_size)];
            match begin_with(&mut host, "proxy_set_shared_data", pieces) {
                Ok([key, value]) => {
                    let world = host.data();
                    let kind = world.personality.shared_data;
                    world.shared.borrow_mut().set(kind, &key, &value, version)
                }
                Err(status) => status,
            }
        },
    )?;
    Ok(())
}
