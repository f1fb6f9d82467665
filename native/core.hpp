// What every file of the core shares: members in files or in memory, results, and faults.
//
// Nothing here depends on an instruction set, and nothing is defined inline, so that no file that is
// compiled for one instruction set can lend its code to another.
#pragma once

#include <stddef.h>
#include <stdint.h>

// A small function of this header: never a copy of its own that the linker could share.
#define SM_INLINE __attribute__((always_inline)) inline

namespace sm {

// Codes of stored types; core/dtypes.py has the same.
enum Type : int64_t { BF16 = 0, F16 = 1, F32 = 2 };

constexpr int64_t MEMORY = -1;          // stands for a descriptor where values lie in memory
constexpr int64_t STRIP = 512;          // coordinates a loop takes at a time: first-level cache
constexpr int64_t LANES = 64;           // partial sums of a float64 sum; part of the result's definition
constexpr int64_t SAMPLE_RUN = 4096;    // coordinates in a row that a sample takes
constexpr int64_t WINDOW = 1 << 15;     // coordinates of every member that are read at a time
constexpr int64_t DRAINED = 1 << 18;    // coordinates of a result that are written at a time

// A member of a merge: a row of the int64 table (type, descriptor or MEMORY, position or address).
struct Source {
    int64_t type, descriptor, place;
};

// Thrown where the system fails; bindings.hpp makes a Python exception of it.
struct Failed {
    enum What { READ, WRITE, NO_MEMORY } what;
    int error;  // errno; 0: the file ended before
    int64_t descriptor, position;
};

// What was merged: whether all that was read is finite, and all that was stored; the checksum of
// what was written to a file.
struct Merged {
    bool fine, stored;
    uint64_t checksum;
};

// Memory of the calling thread for the length of a call; all of it is given back at the end.
class Scratch {
  public:
    Scratch();
    ~Scratch();
    Scratch(const Scratch &) = delete;
    void *bytes(int64_t count);  // with any content; begins a line of the caches
    SM_INLINE float *floats(int64_t count) { return static_cast<float *>(bytes(count * 4)); }
    SM_INLINE double *doubles(int64_t count) { return static_cast<double *>(bytes(count * 8)); }
    SM_INLINE uint32_t *words(int64_t count) { return static_cast<uint32_t *>(bytes(count * 4)); }
    double *zeros(int64_t count);  // doubles

  private:
    int64_t before_;
    void *more_;  // what did not fit into the thread's block
};

// Reads members a window at a time. `at[d]` is the address that coordinate 0 of member d would
// have: a value is at at[d] + width · coordinate, for coordinates of what `need` made ready.
class Reader {
  public:
    Reader(Scratch &, const Source *, int64_t count, int64_t size, int64_t strip = STRIP);
    // Have the coordinates [begin, end) in memory, and what follows up to a window or `size`.
    SM_INLINE void need(int64_t begin, int64_t end) {
        if (end > filled_) fill(begin, end, size_);
    }
    // The same, and nothing that follows.
    SM_INLINE void only(int64_t begin, int64_t end) { fill(begin, end, end); }
    const int64_t count;
    const uint64_t *at;
    const int64_t *types;

  private:
    void fill(int64_t begin, int64_t end, int64_t size);
    const Source *sources_;
    int64_t size_, length_, filled_;
    uint64_t *at_;
    uint8_t **rooms_;
};

// Where a result goes: memory, or a file. `at` is the address that coordinate 0 would have.
class Sink {
  public:
    Sink(Scratch &, const Source &, int64_t size, int64_t strip = STRIP);
    // After coordinates up to `end` were saved: write them if there is no room for one more strip.
    SM_INLINE void drain(int64_t end) {
        if (descriptor_ != MEMORY && (end == size_ || end - begun_ + strip_ > DRAINED)) write(end);
    }
    const int64_t type;
    uint64_t at;
    uint64_t checksum = 0;  // of what was written to a file

  private:
    void write(int64_t end);
    int64_t descriptor_, position_, size_, strip_, begun_ = 0;
    uint8_t *room_ = nullptr;
};

// pread and pwrite of exactly so many bytes; they throw Failed.
void read_at(int64_t descriptor, int64_t position, void *to, int64_t count);
void write_at(int64_t descriptor, int64_t position, const void *from, int64_t count);

SM_INLINE int64_t width_of(int64_t type) { return type == F32 ? 4 : 2; }

// The part of NH (checksum.cpp) that comes from bytes in memory, at `position` of a piece.
uint64_t checksum(const uint8_t *bytes, int64_t count, int64_t position, uint64_t before);

// Reads `count` bytes of a file to `to`, before which is room for WORD bytes, and adds the words
// that end there to the checksums of pieces: rows of `pieces`, where each begins and ends in the file.
constexpr int64_t WORD = 8;
void read_summed(int64_t descriptor, int64_t begin, int64_t count, uint8_t *to, const int64_t *pieces,
                 int64_t number, uint64_t *totals);

// Bytes from files to a GPU and back, through slots of pinned memory (device.cpp).
struct Driver {
    int (*copy_there)(uint64_t to, uint64_t from, uint64_t count, uint64_t stream);
    int (*copy_here)(uint64_t to, uint64_t from, uint64_t count, uint64_t stream);
    int (*record)(uint64_t event, uint64_t stream);
    int (*wait_for)(uint64_t event);
};
struct Ring {
    const int64_t *slots;  // (count, 2): address, event
    int64_t count, slot, stream;
};
// Rows of `spans`: descriptor, position or address, the place after `there`, bytes.
int send(const Driver &, const int64_t *spans, int64_t number, int64_t there, const Ring &);
// Writes bytes of a GPU, which are those from `begun` on of a result; `sum` is its checksum.
int drain(const Driver &, int64_t there, int64_t count, const Ring &, int64_t begun,
          int64_t descriptor, int64_t position, uint64_t &sum);

}  // namespace sm
