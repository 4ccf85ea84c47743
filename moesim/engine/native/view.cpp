// The read-only present that a policy sees.
#include "state.hpp"
#include "streams.hpp"

#include <nanobind/stl/shared_ptr.h>

namespace moesim {

/// Answers of `moesim.policy.View` from the engine's state.
struct View {
    std::shared_ptr<State> state;
    nb::object model, costs, tables, workload, cache_slots;

    DeviceState &device(nb::handle name) const {
        if (DeviceState *found = find_device(*state, name.ptr())) return *found;
        unknown(name);
    }
    [[noreturn]] static void unknown(nb::handle name) {
        PyErr_SetObject(PyExc_KeyError, nb::make_tuple(name).ptr());
        throw nb::python_error();
    }
    i64 first(nb::handle bits) const {
        return first_of(*state, bits.ptr(), [] { return "the view was asked"; });
    }
    /// A unit; -1: the model has none such.
    i64 unit(i64 layer, i64 expert, nb::handle bits) const {
        i64 from = first(bits);
        bool there = layer >= 0 && layer < state->n_layers && expert >= 0 && expert < state->n_experts;
        return there ? from + layer * state->n_experts + expert : -1;
    }

    bool is_resident(i64 layer, i64 expert, nb::handle name, nb::handle bits) const {
        i64 at = unit(layer, expert, bits);
        return device(name).memory.get(at);
    }
    bool is_pending(i64 layer, i64 expert, nb::handle name, nb::handle bits) const { return pending(layer, expert, name, bits); }
    Transfer *pending(i64 layer, i64 expert, nb::handle name, nb::handle bits) const {
        i64 at = unit(layer, expert, bits);
        DeviceState &found = device(name);
        return at >= 0 ? found.pending[at] : nullptr;
    }
    bool is_in_use(i64 layer, i64 expert, nb::handle name, nb::handle bits) const {
        i64 at = unit(layer, expert, bits);
        CopyState *copy = device(name).memory.get(at);
        return copy && copy->in_use > 0;
    }
    nb::object residency(i64 layer, nb::handle name, nb::handle bits) const {
        DeviceMemory &memory = device(name).memory;
        i64 from = unit(layer, 0, bits);
        std::string none(state->n_experts, 0);
        const char *there = reinterpret_cast<const char *>(memory.there.data());
        return own(PyBytes_FromStringAndSize(from < 0 ? none.data() : there + from, state->n_experts));
    }
    i64 remaining(i64 layer, i64 expert, nb::handle name, nb::handle bits) const {
        Transfer *transfer = pending(layer, expert, name, bits);
        return transfer ? remaining_ns(*state, transfer) : 0;
    }
    PoolState *pool(nb::handle name, nb::handle pool_name) const {
        if (PoolState *found = device(name).memory.pool(pool_name)) return found;
        unknown(pool_name);
    }
    nb::object residents(nb::handle name, nb::handle pool_name, nb::handle layer, nb::handle bits) const {
        DeviceMemory &memory = device(name).memory;
        PoolState *found = pool(name, pool_name);
        int words = memory.words(), n = state->n_experts;
        i64 shelf = first(bits) / n, n_shelves = i64(found->held.size());
        auto experts = [&](i64 at) { return rows_of(found->members.data() + at * words, words); };
        nb::object made = own(PyList_New(0));
        auto append = [&](nb::object one) {
            if (PyList_Append(made.ptr(), one.ptr())) throw nb::python_error();
        };
        if (!layer.is_none()) {
            i64 at = as_int(layer);
            at = at < n_shelves ? shelf + at : n_shelves;
            if (at >= 0 && at < n_shelves && found->held[at])
                for (int e : experts(at)) append(nb::steal(num(e)));
            return made;
        }
        for (i64 l = 0; l < state->n_layers; ++l)
            if (found->held[shelf + l])
                for (int e : experts(shelf + l)) {
                    PyObject *pair = PyTuple_New(2);
                    if (!pair) throw nb::python_error();
                    PyTuple_SET_ITEM(pair, 0, num(l));
                    PyTuple_SET_ITEM(pair, 1, num(e));
                    append(nb::steal(pair));
                }
        return made;
    }
    i64 free_bytes(nb::handle name, nb::handle pool_name, nb::handle layer) const {
        PoolState *found = pool(name, pool_name);
        i64 at = found->per_layer ? as_int(layer) : 0, n = i64(found->used.size());
        if (at < 0) at += n;
        if (at < 0 || at >= n) throw nb::index_error("list index out of range");
        return std::max<i64>(0, found->capacity[at] - found->used[at]);
    }
    nb::object named_devices(const std::function<bool(const DeviceState &)> &fits) const {
        nb::list found;
        for (const DeviceState &one : state->devices)
            if (fits(one)) found.append(one.name);
        return found;
    }
    /// A layer, counted from the end if negative, as Python's lists are.
    int layer_of(i64 layer) const {
        i64 n = i64(state->layout->dense_at.size());
        if (layer < 0) layer += n;
        if (layer < 0 || layer >= n) throw nb::index_error("list index out of range");
        return int(layer);
    }
    bool foresees(nb::handle source, i64 layer) const {
        State &s = *state;
        Source *found = source_of(s, source);
        if (!found)
            fail(s, "foresees: " + unknown_name(s, "source", source, s.predictors), "name a prediction source");
        if (knows_step(s, *found) && layer < s.n_layers) return found->table && layer >= found->first_layer;
        for (int mb = 0; mb < s.n_mbs(); ++mb)
            if (ask(s, found->predict, {ref(s.step), num(mb), num(layer)}).is_none()) return false;
        return true;
    }
};

nb::object make_view(std::shared_ptr<State> state, nb::handle twin) {
    View view{std::move(state), attr(twin, "model"), attr(twin, "costs"), attr(twin, "tables"), attr(twin, "workload"), attr(twin, "cache_slots")};
    return nb::cast(std::move(view));
}

State *state_of(nb::handle view) { return nb::isinstance<View>(view) ? nb::inst_ptr<View>(view)->state.get() : nullptr; }

void bind_view(nb::module_ &module) {
    nb::class_<View> view(module, "View", "Answers of `moesim.policy.View` from the native engine's state.");
    view.def_prop_ro("now_ns", [](const View &v) { return v.state->now; })
        .def_prop_ro("model", [](const View &v) { return v.model; })
        .def_prop_ro("costs", [](const View &v) { return v.costs; })
        .def_prop_ro("tables", [](const View &v) { return v.tables; })
        .def_prop_ro("devices", [](const View &v) { return v.named_devices([](const DeviceState &) { return true; }); })
        .def_prop_ro("gpus", [](const View &v) { return v.named_devices([](const DeviceState &d) { return d.is_gpu; }); })
        .def_prop_ro("cpus", [](const View &v) { return v.named_devices([](const DeviceState &d) { return d.computes && !d.is_gpu; }); })
        .def_prop_ro("compute", [](const View &v) { return attr(attr(v.costs, "hardware"), "compute"); })
        .def_prop_ro("host", [](const View &v) { return own(PySequence_GetItem(attr(attr(v.costs, "hardware"), "backing").ptr(), 0)); })
        .def_prop_ro("max_tokens", [](const View &v) { return attr(v.workload, "max_tokens"); })
        .def("cache_slots", [](const View &v, nb::handle device) {
                return ask(*v.state, attr(v.cache_slots, "get"), {ref(device), num(0)});
            }, nb::arg("device").none())
        .def("dense_device", [](const View &v, i64 layer) { return v.state->layout->dense_at[v.layer_of(layer)]->name; }, nb::arg("layer"))
        .def("dense_ns", [](const View &v, i64 layer) { return dense_ns(*v.state, v.layer_of(layer)); }, nb::arg("layer"))
        .def("foresees", &View::foresees, nb::arg("source"), nb::arg("layer"))
        .def("free_bytes", &View::free_bytes, nb::arg("device").none(), nb::arg("pool").none(), nb::arg("layer").none() = 0)
        .def("residents", &View::residents, nb::arg("device").none(), nb::arg("pool").none(), nb::arg("layer").none() = nb::none(),
             nb::arg("bits").none() = nb::none())
        .def("residency", &View::residency, nb::arg("layer"), nb::arg("device").none(), nb::arg("bits").none() = nb::none());
    auto of_unit = [&](const char *name, auto method) {
        view.def(name, method, nb::arg("layer"), nb::arg("expert"), nb::arg("device").none(), nb::arg("bits").none() = nb::none());
    };
    of_unit("is_resident", &View::is_resident);
    of_unit("is_pending", &View::is_pending);
    of_unit("is_in_use", &View::is_in_use);
    of_unit("remaining_ns", &View::remaining);
}

}  // namespace moesim
