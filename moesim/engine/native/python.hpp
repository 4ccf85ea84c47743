// The names of the contract that the engine makes or compares, looked up once a run.
#pragma once

#include "common.hpp"

namespace moesim {

enum EventKind { STEP_BEGIN, LAYER_BEGIN, ROUTED, PREDICTED, FETCHED, RAN, SHARED_RAN, SENT, LAYER_END, STEP_END, N_EVENTS };
enum ActionKind { FETCH, DROP, MOVE, RUN, SKIP, PREDICT, SEND, N_ACTIONS };

struct Contract {
    PyTypeObject *event[N_EVENTS];
    PyTypeObject *action[N_ACTIONS];
    nb::object keep[int(N_EVENTS) + int(N_ACTIONS)];
    nb::object decide, evict;  // names of methods
    nb::object texts;  // moesim.engine.native.texts: messages and rare computations
    nb::object fail;

    void load() {
        static const char *events[] = {"StepBegin", "LayerBegin", "Routed", "Predicted", "Fetched",
                                       "Ran", "SharedRan", "Sent", "LayerEnd", "StepEnd"};
        static const char *actions[] = {"Fetch", "Drop", "Move", "Run", "Skip", "Predict", "Send"};
        nb::object policy = nb::module_::import_("moesim.policy");
        for (int i = 0; i < N_EVENTS; ++i) {
            keep[i] = attr(policy, events[i]);
            event[i] = reinterpret_cast<PyTypeObject *>(keep[i].ptr());
        }
        for (int i = 0; i < N_ACTIONS; ++i) {
            keep[int(N_EVENTS) + i] = attr(policy, actions[i]);
            action[i] = reinterpret_cast<PyTypeObject *>(keep[int(N_EVENTS) + i].ptr());
        }
        decide = nb::steal(PyUnicode_InternFromString("decide"));
        evict = nb::steal(PyUnicode_InternFromString("evict"));
        texts = nb::module_::import_("moesim.engine.native.texts");
        fail = attr(texts, "fail");
    }
};

}  // namespace moesim
