//! AMX tile registers, eight of sixteen rows of 64 bytes, and their products.

use crate::bf16::amx_fused::TileUnit;
use core::arch::asm;
use core::cell::Cell;
use core::marker::PhantomData;
use core::mem::ManuallyDrop;

/// Rows of a register.
pub(crate) const ROWS: usize = 16;
/// Bytes of a row of a register: 16 sums of 32 bits, or 16 pairs of 16 bits.
pub(crate) const ROW_BYTES: usize = 64;
/// Elements of 16 bits that one instruction multiplies and adds for each sum.
pub(crate) const DEPTH: usize = 32;

/// Tile configuration, as `LDTILECFG` reads it.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// All registers as large as they can be.
static LARGEST: Configuration = {
    let mut configuration =
        Configuration { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
    let mut register = 0;
    while register < 8 {
        configuration.row_bytes[register] = ROW_BYTES as u16;
        configuration.rows[register] = ROWS as u8;
        register += 1;
    }
    configuration
};

/// The tile registers of this thread, configured. They are released on drop, so that no code but ours finds
/// them in use, and the operating system need not save them.
pub(crate) struct Tiles {
    /// The configuration is that of a thread.
    of_thread: PhantomData<*const ()>,
}

impl Tiles {
    /// # Safety
    ///
    /// Processor and operating system let this process use tiles.
    unsafe fn configure() -> Self {
        // SAFETY: the configuration is valid for palette 1, and the caller vouches for the instruction.
        unsafe {
            asm!(
                "ldtilecfg [{configuration}]",
                configuration = in(reg) &raw const LARGEST,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly, preserves_flags),
            );
        }
        CONFIGURED.set(true);
        Self { of_thread: PhantomData }
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        CONFIGURED.set(false);
        // SAFETY: tiles were configured, so the instruction is there.
        unsafe {
            asm!(
                "tilerelease",
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, nomem, preserves_flags),
            );
        }
    }
}

thread_local! {
    /// True while the tile registers of this thread are configured.
    static CONFIGURED: Cell<bool> = const { Cell::new(false) };
}

/// Calls `work` with the tile registers of this thread configured. To be called around all the work of a thread, because
/// configuring and releasing take 70 ns, which is a tenth of a small product.
///
/// # Safety
///
/// Processor and operating system let this process use tiles.
pub(crate) unsafe fn with_tiles<T>(work: impl FnOnce(&Tiles) -> T) -> T {
    if CONFIGURED.get() {
        // Not dropped: the caller that configured them releases them.
        return work(&ManuallyDrop::new(Tiles { of_thread: PhantomData }));
    }
    // SAFETY: the caller vouches for tiles.
    work(&unsafe { Tiles::configure() })
}

/// The operands of a block of a product, as addresses. Strides are in bytes, from a row to the next.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    /// Rows of elements of 16 bits.
    pub(crate) left: *const u8,
    pub(crate) left_stride: usize,
    /// From one step to the next.
    pub(crate) left_step: usize,
    /// Rows of pairs: the elements of rows `2 i` and `2 i + 1` of the right factor side by side.
    pub(crate) right: *const u8,
    pub(crate) right_stride: usize,
    /// Rows of `f32`.
    pub(crate) product: *mut u8,
    pub(crate) product_stride: usize,
    /// Steps of [`DEPTH`] elements.
    pub(crate) steps: usize,
    /// True if the product is added to the one so far.
    pub(crate) adds: bool,
}

#[expect(clippy::unused_self, reason = "it is a witness of the configuration")]
impl Tiles {
    /// Multiplies a block of 32 rows by 32 columns: four sums in registers, two registers for each factor, so that each register
    /// that is loaded is used twice.
    ///
    /// # Safety
    ///
    /// The block lies within its operands: 32 rows of the left factor and of the product, 32 columns of the right factor
    /// and of the product, `steps` times [`DEPTH`] elements of depth.
    pub(crate) unsafe fn multiply_32_by_32(&self, block: Block) {
        // SAFETY: `self` is a witness of the configuration; the caller vouches for the addresses.
        unsafe {
            asm!(
                "test {adds:e}, {adds:e}",
                "jz 2f",
                "tileloadd tmm0, [{product} + {product_stride}*1]",
                "tileloadd tmm1, [{product} + {product_stride}*1 + 64]",
                "tileloadd tmm2, [{lower_product} + {product_stride}*1]",
                "tileloadd tmm3, [{lower_product} + {product_stride}*1 + 64]",
                "jmp 3f",
                "2:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "3:",
                "test {steps}, {steps}",
                "jz 5f",
                "4:",
                "tileloadd tmm4, [{left} + {left_stride}*1]",
                "tileloadd tmm6, [{right} + {right_stride}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tileloadd tmm7, [{right} + {right_stride}*1 + 64]",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloadd tmm5, [{lower_left} + {left_stride}*1]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {left}, {left_step}",
                "add {lower_left}, {left_step}",
                "add {right}, {right_step}",
                "dec {steps}",
                "jnz 4b",
                "5:",
                "tilestored [{product} + {product_stride}*1], tmm0",
                "tilestored [{product} + {product_stride}*1 + 64], tmm1",
                "tilestored [{lower_product} + {product_stride}*1], tmm2",
                "tilestored [{lower_product} + {product_stride}*1 + 64], tmm3",
                adds = in(reg) u32::from(block.adds),
                product = in(reg) block.product,
                lower_product = in(reg) block.product.wrapping_add(ROWS * block.product_stride),
                product_stride = in(reg) block.product_stride,
                left = inout(reg) block.left => _,
                lower_left = inout(reg) block.left.wrapping_add(ROWS * block.left_stride) => _,
                left_stride = in(reg) block.left_stride,
                left_step = in(reg) block.left_step,
                right = inout(reg) block.right => _,
                right_stride = in(reg) block.right_stride,
                right_step = in(reg) ROWS * block.right_stride,
                steps = inout(reg) block.steps => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack),
            );
        }
    }

    /// Multiplies a block of 16 rows by 16 columns, for what remains.
    ///
    /// # Safety
    ///
    /// As [`multiply_32_by_32`](Self::multiply_32_by_32), with 16 for 32.
    pub(crate) unsafe fn multiply_16_by_16(&self, block: Block) {
        // SAFETY: `self` is a witness of the configuration; the caller vouches for the addresses.
        unsafe {
            asm!(
                "tilezero tmm0",
                "test {adds:e}, {adds:e}",
                "jz 3f",
                "tileloadd tmm0, [{product} + {product_stride}*1]",
                "3:",
                "test {steps}, {steps}",
                "jz 5f",
                "4:",
                "tileloadd tmm4, [{left} + {left_stride}*1]",
                "tileloadd tmm6, [{right} + {right_stride}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "add {left}, {left_step}",
                "add {right}, {right_step}",
                "dec {steps}",
                "jnz 4b",
                "5:",
                "tilestored [{product} + {product_stride}*1], tmm0",
                adds = in(reg) u32::from(block.adds),
                product = in(reg) block.product,
                product_stride = in(reg) block.product_stride,
                left = inout(reg) block.left => _,
                left_stride = in(reg) block.left_stride,
                left_step = in(reg) block.left_step,
                right = inout(reg) block.right => _,
                right_stride = in(reg) block.right_stride,
                right_step = in(reg) ROWS * block.right_stride,
                steps = inout(reg) block.steps => _,
                out("tmm0") _, out("tmm4") _, out("tmm6") _,
                options(nostack),
            );
        }
    }
}

/// One instruction each. No compiler puts anything into tile registers, so what one leaves there the next finds; that all of
/// them are said to change tells it to leave them alone.
macro_rules! tile_instruction {
    ($template:literal, [$($options:ident),*], $($operands:tt)*) => {
        asm!(
            $template,
            $($operands)*
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack, preserves_flags, $($options),*),
        )
    };
}

impl TileUnit for Tiles {
    #[inline]
    fn zero<const TILE: usize>(&self) {
        // SAFETY: `self` is a witness of the configuration.
        unsafe { tile_instruction!("tilezero tmm{tile}", [nomem], tile = const TILE,) }
    }

    #[inline]
    unsafe fn load<const TILE: usize>(&self, place: *const u8, stride: usize) {
        // SAFETY: `self` is a witness of the configuration; the caller vouches for the place.
        unsafe {
            tile_instruction!(
                "tileloadd tmm{tile}, [{place} + {stride}*1]", [readonly],
                tile = const TILE, place = in(reg) place, stride = in(reg) stride,
            );
        }
    }

    #[inline]
    unsafe fn store<const TILE: usize>(&self, place: *mut u8, stride: usize) {
        // SAFETY: `self` is a witness of the configuration; the caller vouches for the place.
        unsafe {
            tile_instruction!(
                "tilestored [{place} + {stride}*1], tmm{tile}", [],
                tile = const TILE, place = in(reg) place, stride = in(reg) stride,
            );
        }
    }

    #[inline]
    fn multiply<const SUM: usize, const LEFT: usize, const RIGHT: usize>(&self) {
        // SAFETY: `self` is a witness of the configuration.
        unsafe {
            tile_instruction!(
                "tdpbf16ps tmm{sum}, tmm{left}, tmm{right}", [nomem],
                sum = const SUM, left = const LEFT, right = const RIGHT,
            );
        }
    }
}

#[expect(clippy::unused_self, reason = "it is a witness of the configuration")]
impl Tiles {
    /// Multiplies registers that are never loaded, four sums at a time. Returns the number of multiply-adds.
    pub(crate) fn multiply_in_place(&self, rounds: usize) -> usize {
        const SUMS: usize = 4;
        // SAFETY: `self` is a witness of the configuration; no memory is touched.
        unsafe {
            asm!(
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {rounds}",
                "jnz 2b",
                rounds = inout(reg) rounds.max(1) => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                options(nostack, nomem),
            );
        }
        SUMS * rounds.max(1) * ROWS * ROWS * DEPTH
    }
}

/// Multiplies small integers. True if the product is right. May die of an illegal instruction.
pub(crate) fn is_product_right() -> bool {
    /// The bits of a small integer in `bf16`.
    fn bits(integer: i32) -> u16 {
        ((integer as f32).to_bits() >> 16) as u16
    }
    let left_at = |row: usize, step: usize| (row * 3 + step * 5) as i32 % 7 - 3;
    let right_at = |step: usize, column: usize| (step * 2 + column * 11) as i32 % 5 - 2;
    let mut left = [[0_u16; DEPTH]; ROWS];
    let mut right = [[[0_u16; 2]; ROWS]; ROWS];
    for step in 0..DEPTH {
        for index in 0..ROWS {
            left[index][step] = bits(left_at(index, step));
            right[step / 2][index][step % 2] = bits(right_at(step, index));
        }
    }
    let mut product = [[1.0_f32; ROWS]; ROWS];
    let block = Block {
        left: (&raw const left).cast(),
        left_stride: ROW_BYTES,
        left_step: 0,
        right: (&raw const right).cast(),
        right_stride: ROW_BYTES,
        product: (&raw mut product).cast(),
        product_stride: ROW_BYTES,
        steps: 1,
        adds: true,
    };
    // SAFETY: the caller knows that this may be an illegal instruction; the operands are one register each.
    unsafe { Tiles::configure().multiply_16_by_16(block) };
    (0..ROWS).all(|row| {
        (0..ROWS).all(|column| {
            let sum: i32 = (0..DEPTH).map(|step| left_at(row, step) * right_at(step, column)).sum();
            product[row][column] == 1.0 + sum as f32
        })
    })
}
