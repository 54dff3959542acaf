# SPDX-License-Identifier: Apache-2.0
"""GPUs that are not present, as XLA compiles for them."""

import dataclasses
import importlib.util

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sparse_lavida_jax import config

# The description names the driver: without it XLA leaves custom calls out of command buffers.
H200 = """
    platform_name: "CUDA"
    gpu_device_info {
      threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
      shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132
      fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
      block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
      clock_rate_ghz: 1.98 device_memory_size: 150000000000
      shared_memory_per_block_optin: 232448 registers_per_core_limit: 65536
      registers_per_block_limit: 65536
      cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
      driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0"
    }
    dnn_version_info { major: 9 minor: 10 }
    device_description_str: "NVIDIA H200"
"""


@dataclasses.dataclass(frozen=True)
class DescribedGpu:
    """A GPU that is not present.

    Attributes:
        target: its description for XLA.
        kind: its name.
        rates: TFLOP/s of products and GB/s of copies: measured, used for floor and prediction, and
            those of the vendor (dense, bfloat16).
    """

    target: str
    kind: str
    rates: dict[str, dict[str, float]]

    def place(self) -> NamedSharding:
        """Returns where its arrays would lie.

        Raises:
            ConfigError: the CUDA plugin is not installed.
        """
        from jax.experimental import topologies

        if importlib.util.find_spec("jax_cuda13_plugin") is None:
            raise config.ConfigError("there is no CUDA plugin: pip install -e '.[aot-cuda]'.")
        described = topologies.get_topology_desc(
            platform="cuda", topology_name="", target_config=self.target, topology="1x1x1"
        )
        return NamedSharding(Mesh(np.array(described.devices[:1]), ("one",)), PartitionSpec())


DEVICES = {
    "h200": DescribedGpu(
        H200,
        "NVIDIA H200",
        {
            # By hand, 26 November 2026 (docs/speed.md).
            "measured": {"matmul_tflops": 660.0, "copy_gbps": 4300.0},
            "vendor": {"matmul_tflops": 989.0, "copy_gbps": 4800.0},
        },
    )
}
