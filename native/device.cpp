// Bytes from files to a GPU, and from there into files, without Python's lock.
//
// They pass through a ring of small slots of pinned memory: the processor's caches hold a slot from
// when it is filled to when it is copied, and while one is copied the next is filled. The functions
// that copy are those of CUDA's driver.
#include <string.h>

#include "core.hpp"

namespace sm {

namespace {
int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
}  // namespace

int send(const Driver &driver, const int64_t *spans, int64_t number, int64_t there, const Ring &ring) {
    int status = 0;
    int64_t turn = 0;
    try {
        for (int64_t i = 0; i < number; i++) {
            const int64_t *span = spans + 4 * i;
            for (int64_t done = 0; done < span[3]; done += ring.slot) {
                int64_t length = least(ring.slot, span[3] - done);
                uint64_t room = static_cast<uint64_t>(ring.slots[2 * turn]);
                uint64_t event = static_cast<uint64_t>(ring.slots[2 * turn + 1]);
                turn = (turn + 1) % ring.count;
                status |= driver.wait_for(event);
                if (span[0] == MEMORY)
                    memcpy(reinterpret_cast<void *>(room), reinterpret_cast<const void *>(span[1] + done),
                           static_cast<size_t>(length));
                else
                    read_at(span[0], span[1] + done, reinterpret_cast<void *>(room), length);
                status |= driver.copy_there(static_cast<uint64_t>(there + span[2] + done), room,
                                            static_cast<uint64_t>(length), static_cast<uint64_t>(ring.stream));
                status |= driver.record(event, static_cast<uint64_t>(ring.stream));
            }
        }
    } catch (const Failed &) {  // slots are not filled again while they are copied
        for (int64_t i = 0; i < ring.count; i++) driver.wait_for(static_cast<uint64_t>(ring.slots[2 * i + 1]));
        throw;
    }
    for (int64_t i = 0; i < ring.count; i++)
        status |= driver.wait_for(static_cast<uint64_t>(ring.slots[2 * i + 1]));
    return status;
}

int drain(const Driver &driver, int64_t there, int64_t count, const Ring &ring, int64_t begun,
          int64_t descriptor, int64_t position, uint64_t &sum) {
    int status = 0;
    int64_t under_way = 0;
    for (int64_t done = 0; done < count; done += ring.slot) {
        while (under_way < least(count, done + ring.slot * ring.count)) {
            const int64_t *slot = ring.slots + 2 * (under_way / ring.slot % ring.count);
            int64_t length = least(ring.slot, count - under_way);
            status |= driver.copy_here(static_cast<uint64_t>(slot[0]), static_cast<uint64_t>(there + under_way),
                                       static_cast<uint64_t>(length), static_cast<uint64_t>(ring.stream));
            status |= driver.record(static_cast<uint64_t>(slot[1]), static_cast<uint64_t>(ring.stream));
            under_way += length;
        }
        const int64_t *slot = ring.slots + 2 * (done / ring.slot % ring.count);
        int64_t length = least(ring.slot, count - done);
        status |= driver.wait_for(static_cast<uint64_t>(slot[1]));
        if (status) return status;
        const uint8_t *bytes = reinterpret_cast<const uint8_t *>(slot[0]);
        sum = checksum(bytes, length, begun + done, sum);
        write_at(descriptor, position + begun + done, bytes, length);
    }
    return status;
}

}  // namespace sm
