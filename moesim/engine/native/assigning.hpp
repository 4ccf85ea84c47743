// Assignment parts: which device executes each active expert, from the engine's own costs.
#pragma once

#include "algorithms/two_ended.hpp"
#include "parts.hpp"

#include <optional>

namespace moesim {

/// Everything on the CPU, resident or not.
struct AllCpu : Assignment {
    Plan assign(const Routing &routing, const std::vector<i64> &waiting) override;
};

/// What is on the GPU stays there, everything else is computed where it is.
struct Resident : Assignment {
    Plan assign(const Routing &routing, const std::vector<i64> &waiting) override;
};

/// The resident split in decode; in prefill everything on the GPU.
struct ResidentInDecode : Resident {
    void step_begin(bool is_prefill) override { prefill = is_prefill; }
    Plan assign(const Routing &routing, const std::vector<i64> &waiting) override;

private:
    bool prefill = false;
};

/// Fiddler's rule with constants instead of the costs of the machine.
struct FixedThreshold : Assignment {
    double cpu_ms = 0, load_ms = 0;

    Plan assign(const Routing &routing, const std::vector<i64> &waiting) override;
};

/// Time of an expert on a device by its rows.
struct CostTable {
    State *state = nullptr;
    DeviceState *device = nullptr;
    i64 operator()(i64 rows) const { return expert_ns(*state, device, 0, int(rows)); }
};

/// What has costs of both devices.
struct Costed : Assignment {
    bool shared_in_plan = false;  // the GPU's total begins with the layer's shared experts

    void start(const Setup &setup) override;

protected:
    State *state = nullptr;
    CostTable gpu_ns, cpu_ns;
    i64 gpu_first = 0, cpu_first = 0;
    i64 shared_ns(const Routing &routing);

private:
    std::unordered_map<i64, i64> shared;  // by rows
};

/// DALI's Algorithm 1.
struct Greedy : Costed {
    Plan assign(const Routing &routing, const std::vector<i64> &waiting) override;
};

/// Beam search in the greedy order.
struct Beam : Costed {
    i64 width = 2;

    Plan assign(const Routing &routing, const std::vector<i64> &waiting) override;
};

/// Fiddler's rule: an expert that is not on the GPU goes to the CPU if that is sooner than transfer plus compute.
struct Threshold : Costed {
    Plan assign(const Routing &routing, const std::vector<i64> &waiting) override;
};

using Timings = algorithms::Timings<CostTable>;

std::vector<Timings> layer_timings(const Setup &setup);

/// HybriMoE's paper: a plan from three simulated timelines, of GPU, CPU and link.
struct Queues : Costed {
    algorithms::Reading reading;

    void start(const Setup &setup) override;
    Plan assign(const Routing &routing, const std::vector<i64> &waiting) override;

private:
    std::vector<Timings> timings;  // of each layer
};

/// A cost in proportion to the rows, or the same whatever they are.
struct PerRow {
    double fixed = 0, each = 0;
    double operator()(i64 rows) const { return fixed + each * double(rows); }
};

/// HybriMoE's released code: a list that the GPU eats from the head and the CPU from the tail.
struct TwoEnded : Assignment {
    bool counts_issued = true;  // what is queued for the GPU counts as being there
    bool split_all = false;  // whatever the rows of a step; else several rows go to the GPU
    std::optional<algorithms::Timings<PerRow, double>> constants;  // of the released code; none: the engine's costs

    void start(const Setup &setup) override;
    Plan assign(const Routing &routing, const std::vector<i64> &waiting) override;

private:
    State *state = nullptr;
    DeviceState *gpu = nullptr;
    std::vector<Timings> timings;  // of each layer
};

}  // namespace moesim
