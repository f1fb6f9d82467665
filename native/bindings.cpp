// The module `sigmerge._native`: what Python calls. Each function lets go of Python's lock.
#include "bindings.hpp"

#include <fcntl.h>

#include <string.h>

#include "dispatch.hpp"

namespace sm {

void bind_claim(nb::module_ &);  // bindings_claim.cpp
void bind_products(nb::module_ &);  // bindings_products.cpp
void bind_low_rank(nb::module_ &);  // bindings_low_rank.cpp
void bind_coordinates(nb::module_ &);  // bindings_coordinates.cpp
void bind_merge(nb::module_ &);  // bindings_merge.cpp

using Bytes = const Array<const uint8_t> &;

using Table = const Array<const int64_t> &;

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

// Functions of CUDA's driver by their addresses: two that copy, one that records, one that waits.
static Driver driver_of(Table functions) {
    expect(functions.size == 4, "four functions");
    Driver driver;
    memcpy(&driver, functions.data, sizeof driver);
    return driver;
}

static Ring ring_of(Table slots, int64_t slot, int64_t stream) {
    expect(slots.rows >= 1 && slots.columns == 2 && slot >= WORD && slot % WORD == 0, "slots of whole words");
    return {slots.data, slots.rows, slot, stream};
}

static void bind_files(nb::module_ &m) {
    m.def("read_summed", [](int64_t descriptor, int64_t begin, const Array<uint8_t> &out, Table pieces,
                            const Array<uint64_t> &totals) {
        expect(out.size >= WORD && begin >= 0, "room for a word before what is read");
        expect(pieces.size == 2 * totals.size, "a sum for each piece");
        Free released;
        read_summed(descriptor, begin, out.size - WORD, out.data + WORD, pieces.data, totals.size, totals.data);
    });
    m.def("advise_file", [](int64_t descriptor, int64_t begin, int64_t end, int64_t step, int64_t advice) {
        expect(step > 0, "a step");
        Free released;
#ifdef POSIX_FADV_NORMAL  // elsewhere nobody can be told
        for (int64_t at = begin; at < end; at += step)
            posix_fadvise(static_cast<int>(descriptor), at, step < end - at ? step : end - at,
                          static_cast<int>(advice));
#else
        (void)descriptor, (void)begin, (void)end, (void)advice;
#endif
    });
    m.def("send", [](Table functions, Table spans, int64_t there, Table slots, int64_t slot, int64_t stream) {
        expect(spans.size % 4 == 0, "rows of four");
        Driver driver = driver_of(functions);
        Ring ring = ring_of(slots, slot, stream);
        Free released;
        return send(driver, spans.data, spans.size / 4, there, ring);
    });
    m.def("drain", [](Table functions, int64_t there, int64_t count, Table slots, int64_t slot, int64_t stream,
                      int64_t begun, int64_t descriptor, int64_t position, uint64_t before) {
        Driver driver = driver_of(functions);
        Ring ring = ring_of(slots, slot, stream);
        int status;
        {
            Free released;
            status = drain(driver, there, count, ring, begun, descriptor, position, before);
        }
        return nb::make_tuple(status, before);
    });
    m.def("write", [](int64_t descriptor, int64_t position, Bytes bytes) {
        Free released;
        write_at(descriptor, position, bytes.data, bytes.size);
    });
}

static void bind_philox(nb::module_ &m) {
    m.def("draw", [](uint32_t k0, uint32_t k1, int64_t start, const Array<uint32_t> &out) {
        expect(start >= 0, "an index is at least 0");
        Free released;
        core.philox->fill(k0, k1, start, out.size, out.data);
    });
}

static void bind_sums(nb::module_ &m) {
    m.def("weighted_rows", [](const Array<const float> &weights, bool vectors, const Array<const float> &after,
                              Table members, int64_t size, Table target) {
        const Source *sources = members_of(members);
        expect(members.rows >= weights.size + vectors, "a member for each weight, and the reference");
        expect(after.size % 3 == 0, "steps are rows of three");
        expect(size >= 0 && target.size == 3, "a size, and a row for the target");
        expect_type(target.data[0]);
        Merged merged;
        {
            Free released;
            merged = core.sums->weighted_rows(weights.data, weights.size, vectors, after.data, after.size / 3,
                                              sources, members.rows, size,
                                              *reinterpret_cast<const Source *>(target.data));
        }
        return nb::make_tuple(merged.fine, merged.stored, merged.checksum);
    });
    m.def("add_scaled", [](const Array<float> &total, const Array<const float> &values, float factor) {
        expect(total.size == values.size, "as many values as sums");
        Free released;
        core.sums->add_scaled(total.data, total.size, values.data, factor);
    });
    m.def("scale", [](const Array<float> &out, float divisor, float factor) {
        Free released;
        core.sums->scale(out.data, out.size, divisor, factor);
    });
    m.def("load_rows", [](Table members, Table reference, const Array<float> &rows) {
        const Source *sources = members_of(members), *base = members_of(reference);
        expect(rows.rows == members.rows && reference.rows <= 1, "a row for each member");
        Free released;
        return core.sums->load_rows(sources, members.rows, reference.rows ? base : nullptr, rows.columns,
                                    rows.data);
    });
}

static void expect_experts(Table members, Table experts, int64_t every) {
    expect(every >= 1, "one run in at least one");
    for (int64_t row = 0; row < experts.size; row++)
        expect(experts.data[row] >= 0 && experts.data[row] < members.rows - 1, "no such expert");
}

static void bind_select(nb::module_ &m) {
    m.def("count_high", [](Table members, int64_t size, Table experts, int64_t every,
                           const Array<uint32_t> &counts) {
        const Source *sources = members_of(members);
        expect_experts(members, experts, every);
        expect(counts.rows == experts.size && counts.columns == 2 << 16, "a histogram for each expert");
        Free released;
        return core.select->count_high(sources, members.rows, size, experts.data, experts.size, every,
                                       counts.data);
    });
    m.def("count_inside", [](Table members, int64_t size, Table experts, int64_t every, Table ranges,
                             const Array<uint32_t> &counts, const Array<uint16_t> &left_out,
                             const Array<int64_t> &above) {
        const Source *sources = members_of(members);
        int64_t wanted = experts.size;
        expect_experts(members, experts, every);
        expect(counts.rows == wanted && left_out.size == counts.size && above.size == wanted &&
                   ranges.rows == wanted && ranges.columns == 3, "a row for each expert");
        for (int64_t row = 0; row < wanted; row++) {
            const int64_t *range = ranges.data + 3 * row;
            expect(range[1] >= 1 && range[2] >= 0 && range[2] <= 8 &&
                       (range[1] - 1) >> range[2] < counts.columns, "a range has a place for each count");
        }
        Free released;
        return core.select->count_inside(sources, members.rows, size, experts.data, wanted, every,
                                         ranges.data, counts.data, left_out.data, counts.columns, above.data);
    });
    m.def("add_run", [](Table places, Table counts, Table left_out, int64_t first,
                        const Array<int64_t> &total_counts, const Array<int64_t> &total_left_out) {
        int64_t size = places.size;
        expect(counts.size == size && left_out.size == size && total_left_out.size == total_counts.size,
               "as many places as counts");
        // Places ascend, so that the first and the last show whether there is room for all.
        expect(!size || (places.data[0] >= first && places.data[size - 1] - first < total_counts.size), "room");
        core.select->add_run(places.data, counts.data, left_out.data, size, first, total_counts.data,
                             total_left_out.data);
    }, "Keeps Python's lock, as what follows: it takes microseconds, and to have it back takes longer.");
    m.def("bin_of_rank", [](Table histogram, int64_t k) {
        int64_t left, place = core.select->bin_of_rank(histogram.data, histogram.size, k, left);
        return nb::make_tuple(place, left);
    });
    m.def("entries", [](Table histogram) { return core.select->entries(histogram.data, histogram.size); });
    m.def("take_occupied", [](const Array<uint32_t> &counts, const Array<uint16_t> &left_out,
                              const Array<uint32_t> &kept, const Array<int64_t> &stops) {
        expect(left_out.size == 0 || left_out.size == counts.size, "as much left out as counted");
        expect(kept.rows == 3 && kept.columns >= counts.size && stops.size == counts.rows + 1, "room");
        Free released;
        core.select->take_occupied(counts.data, left_out.size ? left_out.data : nullptr, counts.rows,
                                   counts.columns, kept.data, kept.columns, stops.data);
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
    if (!sm::isa_choose())
        throw nb::import_error("this build or this processor does not have the instruction set that the "
                               "environment variable SIGMERGE_ISA names; leave it unset to take the best one");
    sm::bind_isa(m);
    sm::bind_failures(m);
    sm::bind_convert(m);
    sm::bind_io(m);
    sm::bind_files(m);
    sm::bind_philox(m);
    sm::bind_sums(m);
    sm::bind_select(m);
    sm::bind_claim(m);
    sm::bind_products(m);
    sm::bind_low_rank(m);
    sm::bind_coordinates(m);
    sm::bind_merge(m);
}
