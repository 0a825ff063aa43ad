"""The name of a kernel tells what it is for."""

from traces import CONV, NCCL, PINNED, RELU

from dlojz.traces import kinds

# Kernels and operations of NVIDIA's software, of other makers', and such as only have a word of it
# in their names.
KINDS = {
    kinds.MATRIX: (
        CONV,
        "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>",
        "void wgrad_alg0_engine<float, 128, 5, 5, 3, 3, 3, false, 512>",
        "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT",
        "aten::mkldnn_convolution",
        "aten::addmm",
        "ampere_scudnn_128x64_relu_interior_nn_v1",
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>",
        "aten::baddbmm",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT128x256x32_MI16x16x1",
        "void ck::kernel_gemm_xdl_cshuffle_v1<ck::GridwiseGemm>",
        "_ZN7ck_tile6kentryILi2ENS_38FmhaBatchPrefillWithPagedKVCacheKernel",
        "miopenSp3AsmConv_v30_3_1_gfx9_fp32_f3x2_stride1",
        "attn_fwd",
        "void paged_attention_ll4mi_QKV_mfma16_kernel<0>",
        "triton_tem_fused_mm_3",
        "aten::conv_transpose2d",
    ),
    kinds.REST: (
        RELU,
        "void at::native::max_pool_backward_nhwc<c10::BFloat16, float>",
        "aten::convert_indices",
        "void at::native::upsample_bilinear2d_out_frame<float>",
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>",
        "triton_poi_fused_convolution_relu_transpose_3",
    ),
    kinds.NORMALIZATION: (
        "void at::native::batch_norm_collect_statistics_kernel<at::Var>",
        "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 128, true, 1>",
        "MIOpenBatchNormFwdTrainSpatial",
        "_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi64E",
        "triton_red_fused_convolution_native_layer_norm_1",
    ),
    kinds.LAYOUT: (
        "void cudnn::engines_precompiled::nchwToNhwcKernel<__half, __half>",
        "void at::native::elementwise_kernel<128, 4, direct_copy_kernel>",
        "void cudnn::ops::convertTensor_kernel<float>",
        "batched_transpose_32x32_half",
        "xe_simple_reorder",
    ),
    kinds.COMMUNICATION: (
        NCCL,
        "rccl_main_kernel",
        "oneccl_allreduce_large",
    ),
    kinds.COPIES: (
        PINNED,
        "Memset (Device)",
        "__amd_rocclr_copyBuffer.kd",
        "Memcpy M2D",
    ),
}
ON_TENSOR_CORES = (
    CONV,
    "sm90_xmma_wgrad_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16>",
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT",
)
NOT_ON_TENSOR_CORES = (
    "sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nchwkcrs_nchw_tilesize256",
    "sm80_xmma_gemm_cf32cf32_f32f32_cf32_tn_n_tilesize64x64x8_ffma",
    "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>",
)


def test_the_kind_of_a_kernel():
    named = [(name, kind) for kind, names in KINDS.items() for name in names]
    assert {name: kinds.kind(name) for name, kind in named if kinds.kind(name) != kind} == {}


def test_which_kernels_ran_on_tensor_cores():
    assert [name for name in ON_TENSOR_CORES if not kinds.on_tensor_cores(name)] == []
    assert [name for name in NOT_ON_TENSOR_CORES if kinds.on_tensor_cores(name)] == []
