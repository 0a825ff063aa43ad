"""The name of a kernel tells what it is for."""

import pytest
from traces import CONV, NCCL, PINNED, RELU

from dlojz.traces import kinds


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (CONV, kinds.MATRIX),
        ("void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>", kinds.MATRIX),
        ("void wgrad_alg0_engine<float, 128, 5, 5, 3, 3, 3, false, 512>", kinds.MATRIX),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", kinds.MATRIX),
        ("aten::mkldnn_convolution", kinds.MATRIX),
        ("aten::addmm", kinds.MATRIX),
        (RELU, kinds.REST),
        ("void at::native::max_pool_backward_nhwc<c10::BFloat16, float>", None),
        ("void at::native::batch_norm_collect_statistics_kernel<at::Var>", kinds.NORMALIZATION),
        (
            "void cudnn::bn_bw_1C11_kernel_new<float, float, float2, 128, true, 1>",
            kinds.NORMALIZATION,
        ),
        (
            "void cudnn::engines_precompiled::nchwToNhwcKernel<__half, __half>",
            kinds.LAYOUT,
        ),
        (
            "void at::native::elementwise_kernel<128, 4, direct_copy_kernel>",
            kinds.LAYOUT,
        ),
        ("void cudnn::ops::convertTensor_kernel<float>", kinds.LAYOUT),
        ("aten::convert_indices", kinds.REST),
        ("ampere_scudnn_128x64_relu_interior_nn_v1", kinds.MATRIX),
        ("void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits>", kinds.MATRIX),
        ("aten::baddbmm", kinds.MATRIX),
        (NCCL, kinds.COMMUNICATION),
        (PINNED, kinds.COPIES),
        ("Memset (Device)", kinds.COPIES),
        # Of other makers.
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT128x256x32_MI16x16x1", kinds.MATRIX),
        ("void ck::kernel_gemm_xdl_cshuffle_v1<ck::GridwiseGemm>", kinds.MATRIX),
        ("_ZN7ck_tile6kentryILi2ENS_38FmhaBatchPrefillWithPagedKVCacheKernel", kinds.MATRIX),
        ("miopenSp3AsmConv_v30_3_1_gfx9_fp32_f3x2_stride1", kinds.MATRIX),
        ("attn_fwd", kinds.MATRIX),
        ("void paged_attention_ll4mi_QKV_mfma16_kernel<0>", kinds.MATRIX),
        ("MIOpenBatchNormFwdTrainSpatial", kinds.NORMALIZATION),
        ("_ZN5aiter24add_rmsnorm_quant_kernelIDF16bDF16bLi64E", kinds.NORMALIZATION),
        ("batched_transpose_32x32_half", kinds.LAYOUT),
        ("xe_simple_reorder", kinds.LAYOUT),
        ("__amd_rocclr_copyBuffer.kd", kinds.COPIES),
        ("Memcpy M2D", kinds.COPIES),
        ("rccl_main_kernel", kinds.COMMUNICATION),
        ("oneccl_allreduce_large", kinds.COMMUNICATION),
        # What only has such a word in its name.
        ("void at::native::upsample_bilinear2d_out_frame<float>", kinds.REST),
        ("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16>", kinds.REST),
        ("triton_poi_fused_convolution_relu_transpose_3", kinds.REST),
        ("triton_red_fused_convolution_native_layer_norm_1", kinds.NORMALIZATION),
        ("triton_tem_fused_mm_3", kinds.MATRIX),
        ("aten::conv_transpose2d", kinds.MATRIX),
    ],
)
def test_the_kind_of_a_kernel(name, kind):
    assert kinds.kind(name) == (kind or kinds.REST)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (CONV, True),
        ("sm90_xmma_wgrad_implicit_gemm_f32f32_tf32f32_f32_nhwckrsc_nhwc", True),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16>", True),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT", True),
        ("sm80_xmma_fprop_implicit_gemm_f32f32_f32f32_f32_nchwkcrs_nchw_tilesize256", False),
        ("sm80_xmma_gemm_cf32cf32_f32f32_cf32_tn_n_tilesize64x64x8_ffma", False),
        ("void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>", False),
    ],
)
def test_which_kernels_ran_on_tensor_cores(name, expected):
    assert kinds.on_tensor_cores(name) is expected
