"""Machines of what people paste: each program's format, mixtures with noise, cuts, contradictions."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

from moesim.errors import HardwareError
from moesim.hardware.outputs import SOURCES
from moesim.hardware.pasted import read_pasted

# Each text is made for the test, in the format that the program prints.

SMI = """\
user@box:~$ nvidia-smi
Fri Dec  5 17:40:55 2025
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 580.95.05              Driver Version: 580.95.05      CUDA Version: 13.0     |
+-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
|=========================================+========================+======================|
|   0  NVIDIA GeForce RTX 3060        Off |   00000001:01:00.0 Off |                  N/A |
|  0%   26C    P8              4W /  170W |       1MiB /  12288MiB |      0%      Default |
|                                         |                        |                  N/A |
+-----------------------------------------+------------------------+----------------------+
| Processes:                                                                              |
|    0   N/A  N/A            1907      G   /usr/lib/xorg/Xorg                       4MiB |
"""
SMI_WINDOWS = """\
|   0  NVIDIA GeForce RTX 4090      WDDM  |   00000000:01:00.0  On |                  Off |
|  0%   43C    P8             20W /  450W |    1500MiB /  24564MiB |      2%      Default |
|   1  NVIDIA GeForce RTX 3090      WDDM  |   00000000:05:00.0 Off |                  N/A |
| 30%   31C    P8             12W /  350W |       0MiB /  24576MiB |      0%      Default |
|    0   N/A  N/A            4712    C+G   ...e\\chrome.exe      N/A      |
"""
SMI_LIST = "GPU 0: NVIDIA GeForce RTX 3060 (UUID: GPU-95e3)\nGPU 1: NVIDIA GeForce RTX 4070 Ti SUPER (UUID: GPU-9bfc)\n"
SMI_QUERY = """\
==============NVSMI LOG==============
Attached GPUs                             : 1
GPU 00000000:01:00.0
    Product Name                          : NVIDIA GeForce RTX 3070 Ti Laptop GPU
    PCI
        GPU Link Info
            PCIe Generation
                Max                       : 4
                Current                   : 1
            Link Width
                Max                       : 16x
                Current                   : 8x
    FB Memory Usage
        Total                             : 8192 MiB
        Used                              : 3 MiB
"""
SMI_CSV = """\
name, pcie.link.gen.max, pcie.link.width.current, memory.total [MiB]
NVIDIA GeForce RTX 3090, 4, 8, 24576 MiB
NVIDIA GeForce RTX 3090, 4, 4, 24576 MiB
"""
ROCM = """\
======================= ROCm System Management Interface =======================
GPU[0]\t\t: Card series: \t\tRadeon RX 7900 XTX
GPU[0]\t\t: Card model: \t\t0x744c
GPU[0]\t\t: VRAM Total Memory (B): 25753026560
================================================================================
"""
ROCM_JSON = '{"card0": {"VRAM Total Memory (B)": "21458059264", "Card Series": "Radeon RX 7900 XT", "Card Model": "0x744c"}}\n'
LSCPU = """\
Architecture:             x86_64
  BIOS Model name:        Other            CPU @ 3.4GHz
Model name:               AMD EPYC 9654 96-Core Processor
    Thread(s) per core:   2
    Core(s) per socket:   96
    Socket(s):            2
"""
CPUINFO = "processor\t: 0\nmodel name\t: AMD Ryzen 5 5600 6-Core Processor\nphysical id\t: 0\ncpu cores\t: 6\n"
DMI = """\
Handle 0x0013, DMI type 17, 92 bytes
Memory Device
\tTotal Width: 64 bits
\tData Width: 64 bits
\tSize: No Module Installed
\tLocator: DIMM 0
\tType: Unknown
\tSpeed: Unknown

Handle 0x0015, DMI type 17, 92 bytes
Memory Device
\tTotal Width: 64 bits
\tData Width: 64 bits
\tSize: 32 GB
\tLocator: DIMM 1
\tType: DDR5
\tSpeed: 4800 MT/s
\tConfigured Memory Speed: 6000 MT/s

Handle 0x0017, DMI type 17, 92 bytes
Memory Device
\tData Width: 64 bits
\tSize: 32 GB
\tType: DDR5
\tSpeed: 4800 MT/s
\tConfigured Memory Speed: 6000 MT/s
"""
SOLDERED = "".join(
    "Memory Device\n\tData Width: 32 bits\n\tSize: 16 GB\n\tType: LPDDR5\n\tConfigured Memory Speed: 8000 MT/s\n\n"
    for _ in range(8)
)
MEMINFO = "MemTotal:       65766000 kB\nMemFree:         1024000 kB\n"
FREE = """\
               total        used        free      shared  buff/cache   available
Mem:            62Gi       13Gi        10Gi       9.0Mi        38Gi        49Gi
Swap:           15Gi          0B        15Gi
"""
MAC = """\
Hardware Overview:
      Model Name: Mac Studio
      Chip: Apple M4 Max
      Total Number of Cores: 16 (12 Performance and 4 Efficiency)
      Memory: 128 GB
Graphics/Displays:
    Apple M4 Max:
      Chipset Model: Apple M4 Max
      Total Number of Cores: 40
"""
DXDIAG = """\
      Operating System: Windows 11 Pro 64-bit (10.0, Build 22631)
             Processor: AMD Ryzen 5 5600 6-Core Processor               (12 CPUs), ~3.5GHz
                Memory: 32768MB RAM
           Card name: NVIDIA GeForce RTX 3060
    Dedicated Memory: 12115 MB
           Card name: NVIDIA GeForce RTX 3060
    Dedicated Memory: 12115 MB
"""
SYSTEMINFO = """\
OS Name:                       Microsoft Windows 11 Home
Processor(s):                  1 Processor(s) Installed.
                               [01]: AMD64 Family 25 Model 33 Stepping 2 AuthenticAMD ~3501 Mhz
Total Physical Memory:         32,691 MB
"""
WMIC = """\
C:\\Users\\me>wmic memorychip get Capacity,ConfiguredClockSpeed,DeviceLocator,SMBIOSMemoryType
Capacity     ConfiguredClockSpeed  DeviceLocator   SMBIOSMemoryType  \r\r
17179869184  3200                  ChannelA-DIMM0  26                \r\r
17179869184  3200                  ChannelB-DIMM0  26                \r\r
C:\\Users\\me>wmic cpu get name
Name
13th Gen Intel(R) Core(TM) i7-13700K
"""
CIM = """\
PS C:\\> Get-CimInstance Win32_PhysicalMemory | fl

Capacity             : 34359738368
ConfiguredClockSpeed : 5600
SMBIOSMemoryType     : 34

Capacity             : 34359738368
ConfiguredClockSpeed : 5600
SMBIOSMemoryType     : 34

Name          : AMD Ryzen 7 6800H with Radeon Graphics
NumberOfCores : 8

Name       : Microsoft Basic Display Adapter
Name       : NVIDIA GeForce RTX 3060 Laptop GPU
AdapterRAM : 4293918720
"""
CUDA = """\
ggml_cuda_init: found 2 CUDA devices:
  Device 0: NVIDIA GeForce RTX 3090, compute capability 8.6, VMM: yes
  Device 1: NVIDIA GeForce RTX 3090, compute capability 8.6, VMM: yes
| model                          |       size |     params | backend    | ngl |            test |                  t/s |
"""
HIP = """\
ggml_cuda_init: found 1 ROCm devices (Total VRAM: 24560 MiB):
  Device 0: AMD Radeon RX 7900 XTX, gfx1100 (0x1100), VMM: no, Wave Size: 32, VRAM: 24560 MiB
"""
VULKAN = """\
WARNING: radv is not a conformant Vulkan implementation, testing use only.
ggml_vulkan: Found 2 Vulkan devices:
ggml_vulkan: 0 = Intel(R) Arc(TM) A770 Graphics (Intel Corporation) | uma: 0 | fp16: 1 | warp size: 32
ggml_vulkan: 1 = AMD Radeon RX 9070 XT (RADV GFX1201) (radv) | uma: 0 | fp16: 1 | warp size: 64
"""
METAL = (
    "ggml_metal_device_init: GPU name:   MTL0 (Apple M4 Max)\nggml_metal_device_init: GPU family: MTLGPUFamilyApple9  (1009)\n"
)
BENCH = """\
[
 {
  "cpu_info": "AMD Ryzen 9 7950X 16-Core Processor",
  "gpu_info": "NVIDIA GeForce RTX 4080, NVIDIA GeForce RTX 4080",
"""
NVBANDWIDTH = """\
nvbandwidth Version: v0.8
Device 0: NVIDIA GeForce RTX 4090 (00000000:01:00)
Device 1: NVIDIA GeForce RTX 4090 (00000000:02:00)

Running host_to_device_memcpy_ce.
memcpy CE CPU(row) -> GPU(column) bandwidth (GB/s)
           0         1
 0     25.50     12.26

SUM host_to_device_memcpy_ce 37.76

Running device_to_host_memcpy_ce.
memcpy CE CPU(row) <- GPU(column) bandwidth (GB/s)
           0         1
 0     26.77     13.01

Running host_to_device_bidirectional_memcpy_ce.
memcpy CE CPU(row) <-> GPU(column) bandwidth (GB/s)
           0         1
 0     11.24     10.42

Running all_to_host_memcpy_ce.
memcpy CE CPU(row) <- GPU(column) bandwidth (GB/s)
           0         1
 0      9.11      9.12

Running device_local_copy.
memcpy local GPU(column) bandwidth (GB/s)
           0         1
 0    440.00    111.00
"""
BANDWIDTH_TEST = """\
[CUDA Bandwidth Test] - Starting...
 Device 0: Tesla T4
 Range Mode

 Host to Device Bandwidth, 1 Device(s)
 PINNED Memory Transfers
   Transfer Size (Bytes)        Bandwidth(GB/s)
   1024                         0.3
   32000000                     9.7

 Device to Host Bandwidth, 1 Device(s)
 PAGEABLE Memory Transfers
   Transfer Size (Bytes)        Bandwidth(GB/s)
   32000000                     5.1

 Device to Device Bandwidth, 1 Device(s)
 PINNED Memory Transfers
   Transfer Size (Bytes)        Bandwidth(GB/s)
   32000000                     239.6

Result = PASS
"""
MLC = """\
Intel(R) Memory Latency Checker - v3.11
Measuring idle latencies for random access (in ns)...
                Numa node
Numa node            0       1
       0         101.3   180.2
       1         180.9   100.8

Measuring Peak Injection Memory Bandwidths for the system
Bandwidths are in MB/sec (1 MB/sec = 1,000,000 Bytes/sec)
ALL Reads        :      181223.5
3:1 Reads-Writes :      172511.5
Stream-triad like:      147942.5
"""
MLC_MATRIX = """\
Measuring Memory Bandwidths between nodes within system
Bandwidths are in MB/sec (1 MB/sec = 1,000,000 Bytes/sec)
Using all the threads from each core if Hyper-threading is enabled
Using Read-only traffic type
                Numa node
Numa node            0       1
       0        90000.7 34457.4
       1        34387.1 80000.6
"""
STREAM = """\
STREAM version $Revision: 5.10 $
Number of Threads counted = 8
Function    Best Rate MB/s  Avg time     Min time     Max time
Copy:           33216.0     0.009721     0.009634     0.009820
Scale:          21500.1     0.014911     0.014884     0.014940
Add:            24400.9     0.019700     0.019671     0.019742
Triad:          24000.0     0.020010     0.020000     0.020055
"""


def parts(text: str) -> dict[str, Any]:
    return read_pasted(text).form["parts"]


def rates(text: str) -> dict[str, tuple[float, str]]:
    form = read_pasted(text).form
    return {key: (number["value"] / 1e9, number["source"]) for key, number in form.items() if key != "parts"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (SMI, {"gpu": "GeForce RTX 3060 12GB", "os": "linux"}),
        (SMI_WINDOWS, {"gpu": ["GeForce RTX 4090", "GeForce RTX 3090"], "os": "windows"}),
        (SMI_LIST, {"gpu": ["NVIDIA GeForce RTX 3060", "GeForce RTX 4070 Ti SUPER"]}),  # 12 or 8 GB is not printed
        (SMI_QUERY, {"gpu": "GeForce RTX 3070 Ti Laptop", "pcie": "4x8"}),
        (SMI_CSV, {"gpu": ["GeForce RTX 3090", "GeForce RTX 3090"], "pcie": "4x8"}),
        ("NVIDIA GeForce RTX 3060, 8192 MiB, 4, 16\n", {"gpu": "GeForce RTX 3060 8GB", "pcie": "4x16"}),
        (ROCM, {"gpu": "Radeon RX 7900 XTX"}),
        (ROCM_JSON, {"gpu": "Radeon RX 7900 XT"}),
        (LSCPU, {"cpu": "2x AMD EPYC 9654", "os": "linux"}),
        (CPUINFO, {"cpu": "AMD Ryzen 5 5600"}),
        (DMI, {"ram": "2x32 ddr5-6000", "os": "linux"}),
        (SOLDERED, {"ram": "128GB lpddr5-8000", "os": "linux"}),
        (MEMINFO, {"ram": "64GB", "os": "linux"}),
        (FREE, {"ram": "64GB", "os": "linux"}),
        (MAC, {"gpu": "Apple M4 Max (40)", "cpu": "Apple M4 Max", "ram": "128GB", "os": "macos"}),
        (DXDIAG, {"gpu": "GeForce RTX 3060 12GB", "cpu": "AMD Ryzen 5 5600", "ram": "32GB", "os": "windows"}),
        (SYSTEMINFO, {"ram": "32GB", "os": "windows"}),
        (WMIC, {"cpu": "Intel Core i7-13700K", "ram": "2x16 ddr4-3200", "os": "windows"}),
        (CIM, {"gpu": "GeForce RTX 3060 Laptop", "cpu": "AMD Ryzen 7 6800H", "ram": "2x32 ddr5-5600", "os": "windows"}),
        (CUDA, {"gpu": ["GeForce RTX 3090", "GeForce RTX 3090"]}),
        (HIP, {"gpu": "Radeon RX 7900 XTX"}),
        (VULKAN, {"gpu": ["Arc A770 16GB", "Radeon RX 9070 XT"]}),
        (
            MAC.replace("M4", "M2").replace("Cores: 40", "Cores: 30"),
            {"gpu": "Apple M2 Max (30)", "cpu": "Apple M2 Max", "ram": "128GB", "os": "macos"},
        ),
        (METAL, {"gpu": "Apple M4 Max (40)", "os": "macos"}),
        (BENCH, {"gpu": ["GeForce RTX 4080", "GeForce RTX 4080"], "cpu": "AMD Ryzen 9 7950X"}),
    ],
    ids=lambda value: value.split("\n")[0][:30] if isinstance(value, str) else "",
)
def test_parts_of_each_program(text: str, expected: dict[str, Any]):
    assert parts(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            NVBANDWIDTH,
            {
                "links.cpu0->gpu0.pinned.bytes_per_s": (25.5, "measured"),
                "links.gpu0->cpu0.pinned.bytes_per_s": (26.77, "measured"),
                "devices.gpu0.memory_bytes_per_s": (957.98, "derived"),  # 880 x 1.11 is above 0.95 of the nominal 1008.4
                "links.cpu0->gpu1.pinned.bytes_per_s": (12.26, "measured"),
                "links.gpu1->cpu0.pinned.bytes_per_s": (13.01, "measured"),
            },
        ),
        (
            BANDWIDTH_TEST,
            {
                "links.cpu0->gpu0.pinned.bytes_per_s": (9.7, "measured"),
                "links.gpu0->cpu0.pageable.bytes_per_s": (5.1, "measured"),
                "devices.gpu0.memory_bytes_per_s": (239.6 * 0.88 / 0.79, "derived"),
            },
        ),
        (
            BANDWIDTH_TEST.replace("(GB/s)", "(MB/s)").replace(" 9.7", " 9700.0"),
            {"links.cpu0->gpu0.pinned.bytes_per_s": (9700 * 2**20 / 1e9, "measured")},
        ),
        (MLC, {"devices.cpu0.memory_bytes_per_s": (181.2235, "measured")}),
        (MLC_MATRIX, {"devices.cpu0.memory_bytes_per_s": (170.0013, "derived")}),
        (STREAM, {"devices.cpu0.memory_bytes_per_s": (32, "derived")}),
    ],
    ids=["nvbandwidth", "bandwidthTest", "its old versions", "MLC", "its matrix", "STREAM"],
)
def test_rates_of_each_program(text: str, expected: dict[str, tuple[float, str]]):
    assert rates(text) == {key: (pytest.approx(value, rel=1e-3), label) for key, (value, label) in expected.items()}


def test_rates_have_the_proof_that_a_profile_needs():
    form = read_pasted(NVBANDWIDTH, "my.txt").form
    number = form["links.cpu0->gpu0.pinned.bytes_per_s"]
    assert number["method"] == "nvbandwidth: copies in pinned memory; line 8 of my.txt, read on this date"
    assert (number["repeats"], number["spread"]) == (1, "not printed")
    triad = read_pasted(STREAM, "my.txt").form["devices.cpu0.memory_bytes_per_s"]
    assert triad["how"].startswith("STREAM: Triad x 4/3") and "line 7 of my.txt" in triad["how"]
    assert triad["interval"] == [24e9, 2.1 * 24e9], "streaming stores move what is counted"


def test_copies_that_memory_does_not_limit_are_not_its_rate():
    pasted = read_pasted(NVBANDWIDTH)
    assert "devices.gpu1.memory_bytes_per_s" not in pasted.form
    assert any("222 GB/s" in remark and "22% of its nominal rate" in remark for remark in pasted.remarks)


NOISE = "2026-01-01T00:00:00 INFO starting\nuser@box:~$ ls\n{}\n| a | b |\nName: nothing\nprocessor\t: 1\n\n$ \n"
MIXED = {  # outputs of one machine, and what they have
    "gpu": (SMI.replace("3060 ", "4080 ").replace("12288", "16376"), CUDA.replace("3090", "4080").replace("found 2", "found 1")),
    "cpu": (BENCH, CPUINFO.replace("Ryzen 5 5600 6-Core", "Ryzen 9 7950X 16-Core")),
    "ram": (DMI, MEMINFO),
    "pcie": (SMI_QUERY.replace("3070 Ti Laptop GPU", "4080"),),
    "rates": (MLC, NVBANDWIDTH.replace("4090", "4080")),
}


@pytest.mark.parametrize("seed", range(4))
def test_outputs_in_any_order_with_noise_between_them(seed: int):
    outputs = [text for texts in MIXED.values() for text in texts]
    random.Random(seed).shuffle(outputs)
    text = "\ufeff" + NOISE.join(["", *outputs, ""]).replace("\n", "\r\n")
    pasted = read_pasted(text)
    found = pasted.form["parts"]
    assert found == {
        "gpu": ["GeForce RTX 4080"] * 2, "cpu": "AMD Ryzen 9 7950X", "ram": "2x32 ddr5-6000", "pcie": "4x8", "os": "linux",
    }  # fmt: skip
    assert pasted.form["devices.cpu0.memory_bytes_per_s"]["value"] == 181223500000
    assert "pcie: 8 of 16 lanes are in use; a GPU at rest may use fewer than at work" in pasted.remarks
    assert pasted.missing == []


def test_what_was_taken_is_said_with_its_line():
    text = NOISE + SMI + NOISE + MLC
    lines = text.split("\n")
    taken = read_pasted(text).taken
    assert [(one.what, one.value) for one in taken] == [
        ("gpu", "GeForce RTX 3060 12GB"),
        ("os", "linux"),
        ("devices.cpu0.memory_bytes_per_s", "181.2 GB/s, measured"),
    ]
    for one in taken:
        assert one.text[:40].strip() in " ".join(lines[one.line - 1].split())


def test_what_is_missing_is_said_with_what_would_give_it():
    missing = " | ".join(read_pasted(MLC).missing + read_pasted(SMI_WINDOWS).missing)
    for words in (
        "gpu: no line names one; --gpu",
        "cpu: no line names one",
        "ram: how much, and which (dmidecode",
        "pcie: ",
        "os: ",
    ):
        assert words in missing
    assert "nvbandwidth -t host_to_device_memcpy_ce" in missing
    assert "Intel MLC" not in " ".join(read_pasted(MLC).missing)
    assert parts(MLC) == {"cpu": "181.2GB/s"}, "a rate is enough for a processor without a name"


def test_a_part_that_the_catalogue_lacks_is_named():
    pasted = read_pasted(LSCPU.replace("EPYC 9654 96-Core", "EPYC 1234 5-Core") + SMI_LIST.replace("RTX 3060", "RTX 1234"))
    assert "cpu: AMD EPYC 1234 5-Core Processor is not in the catalogue; --cpu names one" in pasted.missing[0]
    assert pasted.form["parts"] == {"gpu": "GeForce RTX 4070 Ti SUPER", "os": "linux"}
    assert pasted.remarks == ["gpu: not in the catalogue, and passed over: NVIDIA GeForce RTX 1234"]


@pytest.mark.parametrize(
    ("text", "kept", "remark"),
    [
        (
            CUDA + HIP,
            {"gpu": ["GeForce RTX 3090", "GeForce RTX 3090"]},
            "gpu: line 6 (device lines) has Radeon RX 7900 XTX; line 2",
        ),
        (CPUINFO + BENCH, {"cpu": "AMD Ryzen 5 5600"}, "cpu: line 7 (llama.cpp) has AMD Ryzen 9 7950X 16-Core Processor; line 2"),
        (DMI + MEMINFO.replace("657", "267"), {"ram": "2x32 ddr5-6000"}, "ram: line 27 (lscpu, /proc) has 25.5 GiB; line 14"),
        (MLC + MLC.replace("1812", "2812"), {}, "read: line 22 (Intel MLC) has 281.2 GB/s; line 10 (Intel MLC) is taken"),
    ],
    ids=["gpu", "cpu", "ram", "rate"],
)
def test_contradictions_are_said_and_the_first_is_taken(text: str, kept: dict[str, Any], remark: str):
    pasted = read_pasted(text)
    assert all(pasted.form["parts"][key] == value for key, value in kept.items())
    assert any(said.startswith(remark) for said in pasted.remarks), pasted.remarks


def test_rates_of_another_gpu_are_not_taken():
    pasted = read_pasted(SMI_CSV + BANDWIDTH_TEST)
    assert list(pasted.form) == ["parts"]
    assert "gpu: line 5 (device lines) has Tesla T4; line 2 (nvidia-smi --query-gpu) is taken" in pasted.remarks
    assert "line 12 of pasted text (CUDA's bandwidthTest) is of Tesla T4: not used" in pasted.remarks


def test_the_same_gpus_twice_are_no_more_gpus():
    pasted = read_pasted(CUDA + SMI_LIST.replace("3060", "3090").replace("4070 Ti SUPER", "3090") + CUDA)
    assert pasted.form["parts"]["gpu"] == ["GeForce RTX 3090"] * 2 and pasted.remarks == []


def test_a_text_cut_anywhere_is_read_or_refused_in_one_line():
    text = "".join(value for name, value in globals().items() if name.isupper() and isinstance(value, str))
    random.seed(0)
    for _ in range(150):
        start, end = sorted(random.sample(range(len(text)), 2))
        with contextlib.suppress(HardwareError):
            found = read_pasted(text[start : min(end, start + 3000)])
            assert found.taken or found.missing or found.remarks


@pytest.mark.parametrize("text", ["", "hello\n", "| model | size |\n", "\x00\ufffd", "Mem: ", "Triad: MB/s", "GPU 0: (UUID: "])
def test_a_text_with_nothing_in_it(text: str):
    with pytest.raises(HardwareError, match=r"^box: expected outputs of nvidia-smi, .* other lines; paste one$"):
        read_pasted(text, "box")


def test_long_lines_and_long_texts_take_no_time():
    hostile = [
        "a" * 10**6,
        " " * 10**6,
        "\n" * 10**6,
        "Name" + " " * 10**5,
        "| 0 " * 10**5,
        "1 1.0\n" * 10**5,
        "Device 0: " * 10**5,
    ]
    for text in hostile:
        with pytest.raises(HardwareError):
            read_pasted(text)
    with pytest.raises(HardwareError, match="at most 4194304 characters"):
        read_pasted("a" * 5_000_000)


def test_each_program_says_what_it_was_tried_on():
    assert all(source.tried for source in SOURCES)
    assert [source.name for source in read_pasted(SMI + MLC).sources] == ["nvidia-smi", "Intel MLC"]
