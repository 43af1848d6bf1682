"""A trace pairs GPU work with its launches, whatever else the profiler saw."""

import pytest

from labkit import contents, trace


def event(name, cat, ts, dur, correlation=None):
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur,
            "args": {} if correlation is None else {"correlation": correlation}}


EVENTS = [
    event("labkit: one call", "user_annotation", 1000, 500),
    event("aten::add", "cpu_op", 1001, 30),
    event("cudaLaunchKernel", "cuda_runtime", 900, 5, 1), event("void early<float>(int)", "kernel", 1100, 5, 1),
    event("cudaLaunchKernel", "cuda_runtime", 1010, 6, 2), event("void at::native::add<float>(int)", "kernel", 1020, 2, 2),
    event("cuLaunchKernelEx", "cuda_driver", 1030, 4, 3), event("gemm", "kernel", 1040, 8, 3),
    event("cudaMemcpyAsync", "cuda_runtime", 1050, 3, 4), event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 1055, 1, 4),
    event("cudaDeviceSynchronize", "cuda_runtime", 1060, 90, 5),
]


def test_kernels_come_in_order_with_their_launches():
    found = trace._trace(EVENTS[::-1], "labkit: one call", contents.short_name)
    assert [(k.name, k.launch_at_us, k.launch_us, k.start_us, k.gpu_us) for k in found.kernels] == [
        ("add", 0, 6, 10, 2), ("gemm", 20, 4, 30, 8), ("Memcpy", 40, 3, 45, 1)]
    assert len(found) == 3 and found.busy_us == 11 and found.span_us == 46
    assert found.idle_share == pytest.approx(1 - 11 / 46)
    assert found.rows(how="eager")[1] == {"how": "eager", "index": 1, "name": "gemm", "launch_at_us": 20, "launch_us": 4,
                                          "start_us": 30, "gpu_us": 8}


def test_one_graph_launch_stands_behind_all_of_its_kernels():
    events = [EVENTS[0], event("cudaGraphLaunch", "cuda_runtime", 1010, 7, 9)]
    events += [event(f"k{i}", "kernel", 1020 + 3 * i, 2, 9) for i in range(5)]
    found = trace._trace(events, "labkit: one call", contents.short_name)
    assert {(k.launch_at_us, k.launch_us) for k in found.kernels} == {(0, 7)} and len(found) == 5


def test_a_call_without_gpu_work_is_an_error():
    with pytest.raises(RuntimeError, match="launched no work on the GPU"):
        trace._trace(EVENTS[:2], "labkit: one call", contents.short_name)


@pytest.mark.parametrize("name, short", [
    ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctorOnSelf_add<float>, std::array<char*, 2ul> >"
     "(int, at::native::CUDAFunctorOnSelf_add<float>, std::array<char*, 2ul>)", "vectorized_elementwise_kernel"),
    ("nvjet_hsh_64x8_64x16_4x1_v_bz_TNN", "nvjet_hsh_64x8_64x16_4x1_v_bz_TNN"),
    ("void (anonymous namespace)::softmax_warp_forward<c10::Half, float>(x*)", "softmax_warp_forward"),
    ("Memset (Device)", "Memset"), ("_Z3fooi", "_Z3fooi")])
def test_short_names(name, short):
    assert contents.short_name(name) == short


def test_a_symbol_is_written_as_in_its_source():
    assert contents._demangled("_ZN2at6native3addEi") in ("at::native::add(int)", "_ZN2at6native3addEi")
    assert contents._demangled("plain_c_name") == "plain_c_name"
