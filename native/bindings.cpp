// The module `sigmerge._native`: what Python calls. Each function lets go of Python's lock.
#include "bindings.hpp"

#include <string.h>

#include "dispatch.hpp"

namespace sm {

void bind_merge(nb::module_ &);  // bindings_merge.cpp

using Bytes = const Array<const uint8_t> &;

static void expect_type(int64_t type) { expect(type >= BF16 && type <= F32, "no known type"); }

static void bind_convert(nb::module_ &m) {
    m.def("widen", [](int64_t type, Bytes raw, const Array<float> &out) {
        expect_type(type);
        expect(raw.size == out.size * width_of(type), "as many stored values as float32 values");
        Free released;
        return core.convert->widen(type, raw.data, out.size, out.data);
    });
    m.def("narrow", [](int64_t type, const Array<const float> &values, const Array<uint8_t> &out) {
        expect_type(type);
        expect(out.size == values.size * width_of(type), "as many stored values as float32 values");
        Free released;
        return core.convert->narrow(type, values.data, values.size, out.data);
    });
    m.def("finite", [](int64_t type, Bytes raw) {
        expect_type(type);
        Free released;
        return core.convert->finite(type, raw.data, raw.size / width_of(type));
    });
}

static void bind_io(nb::module_ &m) {
    m.def("checksum", [](Bytes bytes, int64_t position, uint64_t before) {
        Free released;
        return checksum(bytes.data, bytes.size, position, before);
    }, nb::arg("bytes"), nb::arg("position") = 0, nb::arg("before") = 0);
    m.def("read", [](int64_t descriptor, int64_t position, const Array<uint8_t> &out) {
        Free released;
        read_at(descriptor, position, out.data, out.size);
    });
}

static void bind_philox(nb::module_ &m) {
    m.def("draw", [](uint32_t k0, uint32_t k1, int64_t start, const Array<uint32_t> &out) {
        expect(start >= 0, "an index is at least 0");
        Free released;
        core.philox->fill(k0, k1, start, out.size, out.data);
    });
}

static void bind_isa(nb::module_ &m) {
    m.def("isas", [] {
        nb::list names;
        for (int isa = 0; isa < ISAS; isa++)
            if (isa_names[isa] && isa_runs(isa)) names.append(isa_names[isa]);
        return names;
    }, "Instruction sets of this build that the processor has, from the oldest on.");
    m.def("isa", [] { return isa_names[isa_used()]; }, "The one in use.");
    m.def("use_isa", [](const char *name) {
        for (int isa = 0; isa < ISAS; isa++)
            if (isa_names[isa] && !strcmp(name, isa_names[isa]) && isa_runs(isa)) return isa_use(isa);
        throw nb::value_error("this build or this processor has no such instruction set");
    }, "For tests: no other thread may be in the core meanwhile.");
}

static nb::object *failures[2];  // ReadFailed, WriteFailed

static void bind_failures(nb::module_ &m) {
    const char *names[2] = {"sigmerge._native.ReadFailed", "sigmerge._native.WriteFailed"};
    for (int i = 0; i < 2; i++) {
        failures[i] = new nb::object(nb::steal(PyErr_NewException(names[i], PyExc_OSError, nullptr)));
        m.attr(names[i] + 17) = *failures[i];
    }
    nb::register_exception_translator([](const std::exception_ptr &thrown, void *) {
        try {
            std::rethrow_exception(thrown);
        } catch (const Failed &failed) {
            if (failed.what == Failed::NO_MEMORY) {
                PyErr_NoMemory();
                return;
            }
            nb::str text(failed.error ? strerror(failed.error) : "the file ended before: it has shrunk");
            nb::object type = *failures[failed.what == Failed::WRITE];
            nb::object made = type(failed.error ? failed.error : EIO, text);
            made.attr("descriptor") = failed.descriptor;
            made.attr("position") = failed.position;
            made.attr("shrank") = failed.error == 0;
            PyErr_SetObject(type.ptr(), made.ptr());
        }
    });
}

}  // namespace sm

NB_MODULE(_native, m) {
    sm::isa_choose();
    sm::bind_isa(m);
    sm::bind_failures(m);
    sm::bind_convert(m);
    sm::bind_io(m);
    sm::bind_philox(m);
    sm::bind_merge(m);
}
