// Memory of threads, reading and writing: what does not depend on an instruction set.
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#ifdef _WIN32
#include <io.h>
#include <malloc.h>
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <unistd.h>
#endif

#include "families.hpp"

namespace sm {

namespace {

#ifdef _WIN32
// Windows has these under other names: positions in a structure, errors in a number of its own.
using Call = BOOL(__stdcall *)(HANDLE, void *, DWORD, DWORD *, OVERLAPPED *);

int64_t called(Call call, int descriptor, void *at, int64_t count, int64_t position) {
    OVERLAPPED place = {};
    place.Offset = static_cast<DWORD>(position);
    place.OffsetHigh = static_cast<DWORD>(position >> 32);
    DWORD got = 0, most = static_cast<DWORD>(count < 1 << 30 ? count : 1 << 30);
    HANDLE file = reinterpret_cast<HANDLE>(_get_osfhandle(descriptor));
    if (call(file, at, most, &got, &place) || GetLastError() == ERROR_HANDLE_EOF) return got;
    errno = GetLastError() == ERROR_DISK_FULL ? ENOSPC : EIO;
    return -1;
}

int64_t read_some(int descriptor, void *to, int64_t count, int64_t position) {
    return called(reinterpret_cast<Call>(ReadFile), descriptor, to, count, position);
}

int64_t write_some(int descriptor, const void *from, int64_t count, int64_t position) {
    return called(reinterpret_cast<Call>(WriteFile), descriptor, const_cast<void *>(from), count, position);
}

void *aligned(int64_t line, int64_t count) {
    return _aligned_malloc(static_cast<size_t>(count), static_cast<size_t>(line));
}

void release(void *made) { _aligned_free(made); }
#else
int64_t read_some(int descriptor, void *to, int64_t count, int64_t position) {
    return pread(descriptor, to, static_cast<size_t>(count), position);
}

int64_t write_some(int descriptor, const void *from, int64_t count, int64_t position) {
    return pwrite(descriptor, from, static_cast<size_t>(count), position);
}

void *aligned(int64_t line, int64_t count) {
    void *made = nullptr;
    return posix_memalign(&made, static_cast<size_t>(line), static_cast<size_t>(count)) ? nullptr : made;
}

void release(void *made) { free(made); }
#endif

constexpr int64_t BLOCK = 16 << 20;  // bytes that a thread keeps; the system gives what is touched
constexpr int64_t LINE = 64;
constexpr int64_t IN_CACHE = 1 << 18;  // bytes that are summed while the second-level cache has them

// A fresh block of a megabyte comes from the system and goes back there each time, under the lock
// of the process's memory, for which the page faults of all other threads wait. A thread keeps one.
struct Block {
    uint8_t *begin = nullptr;
    int64_t taken = 0;
    ~Block() { release(begin); }
};
thread_local Block block;

struct More {
    void *next;
};

void *allocated(int64_t count) {
    void *made = aligned(LINE, count);
    if (!made) throw Failed{Failed::NO_MEMORY, ENOMEM, MEMORY, 0};
    return made;
}

}  // namespace

Scratch::Scratch() : before_(block.taken), more_(nullptr) {}

Scratch::~Scratch() {
    block.taken = before_;
    while (more_) {
        void *next = static_cast<More *>(more_)->next;
        release(more_);
        more_ = next;
    }
}

void *Scratch::bytes(int64_t count) {
    count = (count + LINE - 1) / LINE * LINE;
    if (block.taken + count <= BLOCK) {
        if (!block.begin) block.begin = static_cast<uint8_t *>(allocated(BLOCK));
        block.taken += count;
        return block.begin + block.taken - count;
    }
    void *made = allocated(LINE + count);
    static_cast<More *>(made)->next = more_;
    more_ = made;
    return static_cast<uint8_t *>(made) + LINE;
}

double *Scratch::zeros(int64_t count) {
    double *made = doubles(count);
    memset(made, 0, static_cast<size_t>(count) * sizeof(double));
    return made;
}

void read_at(int64_t descriptor, int64_t position, void *to, int64_t count) {
    for (int64_t done = 0; done < count;) {
        int64_t got = read_some(static_cast<int>(descriptor), static_cast<uint8_t *>(to) + done, count - done,
                                position + done);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) throw Failed{Failed::READ, got < 0 ? errno : 0, descriptor, position + done};
        done += got;
    }
}

void write_at(int64_t descriptor, int64_t position, const void *from, int64_t count) {
    for (int64_t done = 0; done < count;) {
        int64_t got = write_some(static_cast<int>(descriptor), static_cast<const uint8_t *>(from) + done,
                                 count - done, position + done);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) throw Failed{Failed::WRITE, got < 0 ? errno : ENOSPC, descriptor, position + done};
        done += got;
    }
}

uint64_t checksum(const uint8_t *bytes, int64_t count, int64_t position, uint64_t before) {
    int64_t whole = count / 8;
    uint64_t first = static_cast<uint64_t>(position / 8), last = 0;
    uint64_t total = core.checksums->sum_words(bytes, whole, first, before);
    if (count % 8 == 0) return total;
    memcpy(&last, bytes + 8 * whole, static_cast<size_t>(count % 8));
    return core.checksums->sum_words(&last, 1, first + static_cast<uint64_t>(whole), total);
}

void read_summed(int64_t descriptor, int64_t begin, int64_t count, uint8_t *to, const int64_t *pieces,
                 int64_t number, uint64_t *totals) {
    int64_t before = begin < WORD ? begin : WORD;  // a word that ends here may begin before
    read_at(descriptor, begin - before, to - before, before);
    for (int64_t done = 0; done < count; done += IN_CACHE) {
        int64_t some = count - done < IN_CACHE ? count - done : IN_CACHE;
        int64_t from = begin + done, end = from + some;
        read_at(descriptor, from, to + done, some);
        for (int64_t i = 0; i < number; i++) {
            int64_t first = pieces[2 * i], last = pieces[2 * i + 1];
            if (first >= end || last <= from) continue;
            int64_t skip = first < from ? (from - first) / WORD * WORD : 0;
            int64_t stop = last <= end ? last - first : (end - first) / WORD * WORD;
            totals[i] = checksum(to + (first + skip - begin), stop - skip, skip, totals[i]);
        }
    }
}

Reader::Reader(Scratch &scratch, const Source *sources, int64_t members, int64_t size, int64_t strip)
    : count(members), sources_(sources), size_(size), filled_(size) {
    at_ = static_cast<uint64_t *>(scratch.bytes(members * 8));
    at = at_;
    int64_t *kinds = static_cast<int64_t *>(scratch.bytes(members * 8));
    types = kinds;
    rooms_ = static_cast<uint8_t **>(scratch.bytes(members * 8));
    length_ = (strip < WINDOW ? WINDOW / strip : 1) * strip;
    if (length_ > size) length_ = size;
    for (int64_t d = 0; d < members; d++) {
        kinds[d] = sources[d].type;
        at_[d] = static_cast<uint64_t>(sources[d].place);
        rooms_[d] = nullptr;
        if (sources[d].descriptor == MEMORY) continue;
        rooms_[d] = static_cast<uint8_t *>(scratch.bytes(length_ * width_of(kinds[d])));
        filled_ = 0;
    }
}

void Reader::fill(int64_t begin, int64_t end, int64_t size) {
    int64_t stop = begin + length_ < size ? begin + length_ : size;
    if (stop < end) stop = end;
    for (int64_t d = 0; d < count; d++) {
        if (!rooms_[d]) continue;
        int64_t width = width_of(types[d]);
        read_at(sources_[d].descriptor, sources_[d].place + width * begin, rooms_[d], width * (stop - begin));
        at_[d] = reinterpret_cast<uint64_t>(rooms_[d]) - static_cast<uint64_t>(width * begin);
    }
    filled_ = stop;
}

Sink::Sink(Scratch &scratch, const Source &place, int64_t size, int64_t strip)
    : type(place.type), at(static_cast<uint64_t>(place.place)), descriptor_(place.descriptor),
      position_(place.place), size_(size), strip_(strip) {
    if (descriptor_ == MEMORY) return;
    int64_t most = size < DRAINED + strip ? size : DRAINED + strip;
    room_ = static_cast<uint8_t *>(scratch.bytes(most * width_of(type)));
    at = reinterpret_cast<uint64_t>(room_);
}

void Sink::write(int64_t end) {
    int64_t width = width_of(type), count = width * (end - begun_);
    checksum = sm::checksum(room_, count, width * begun_, checksum);
    write_at(descriptor_, position_ + width * begun_, room_, count);
    begun_ = end;
    at = reinterpret_cast<uint64_t>(room_) - static_cast<uint64_t>(width * end);
}

}  // namespace sm
