//! A program of candle-flash-attn as it was, whose manifest has one other line.

#[cfg(test)]
mod tests {
    use candle_core::{Device, Result, Tensor};

    #[test]
    fn a_program_stays_as_it_was() -> Result<()> {
        let (q, k) = (Tensor::ones((1, 5, 4, 64), candle_core::DType::F16, &Device::Cpu)?, 3.0);
        let k = (Tensor::ones((1, 300, 2, 64), candle_core::DType::F16, &Device::Cpu)? * k)?;
        let output = candle_flash_attn::flash_attn(&q, &k, &k, 0.125, true)?;
        let numbers = output.flatten_all()?.to_dtype(candle_core::DType::F32)?.to_vec1::<f32>()?;
        assert_eq!(numbers, vec![3.0; 5 * 4 * 64]);
        Ok(())
    }
}
