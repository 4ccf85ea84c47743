// What Python sees: an Engine that takes a run over, carries it out and gives its records, and the View of its present.
#include "composed.hpp"
#include "streams.hpp"

#include <nanobind/stl/shared_ptr.h>

namespace moesim {

void connect(State &state, nb::object twin, nb::object view);
void adopt(State &state, nb::handle copies);
void sum_up(State &state, nb::object records);
void bind_view(nb::module_ &module);
namespace algorithms {
void bind(nb::module_ &module);
}  // namespace algorithms
nb::object make_view(std::shared_ptr<State> state, nb::handle twin);

/// One run.
struct Engine {
    std::shared_ptr<State> state = std::make_shared<State>();

    nb::object connect(nb::object twin) {
        nb::object view = make_view(state, twin);
        moesim::connect(*state, twin, view);
        return view;
    }
    void run(nb::object records, nb::object copies, nb::object composed) {
        adopt(*state, copies);
        if (!composed.is_none()) state->composed = std::make_unique<Composed>(*state, nb::cast<nb::dict>(composed));
        moesim::run(*state);
        hand_over(*state, records);
        sum_up(*state, records);
    }
    /// Let go of what leads back to the policy and of what is still to be done. A view that a policy keeps answers as before.
    void close() {
        State &s = *state;
        for (nb::object *one : {&s.twin, &s.policy, &s.view, &s.steps, &s.progress, &s.sink}) *one = nb::none();
        for (DeviceState &device : s.devices) device.twin = nb::none();
        s.composed.reset();
        s.clock.calls.clear();
        s.deferred.clear();
        s.unheard.clear();
        s.goes_on = nullptr;
        s.gate_input_waiters.clear();
        s.tasks.made.clear();
        for (Transfer &transfer : s.transfers.made) transfer.on_arrival = nullptr;
        s.records = {};
    }
};

}  // namespace moesim

NB_MODULE(_native, module) {
    using moesim::Engine;
    module.doc() = "The native engine: the rules of moesim.engine in C++, file by file.";
    moesim::bind_view(module);
    nb::module_ algorithms = module.def_submodule("algorithms", "Twins of functions of moesim.policies, by their names.");
    moesim::algorithms::bind(algorithms);
    module.attr("View").attr("algorithms") = algorithms;  // for `moesim.policies.base.twin`
    nb::class_<Engine>(module, "Engine", "One run, taken over from Python's setup.")
        .def(nb::init<>())
        .def("connect", &Engine::connect, "Read the machine; return the view that policies see.")
        .def("run", &Engine::run, nb::arg("records"), nb::arg("copies"), nb::arg("composed").none(),
             "Carry out all steps, from copies that are placed, and fill in the records; a composition of parts that are there in C++ "
             "decides there.")
        .def("close", &Engine::close, "Let go of the run.");
}
