// Runs a kernel: the threads of a block one after another on one stack, until one waits at a barrier; then the others go
// on, each on a stack of its own. A kernel without barriers so costs no switch at all.
//
// Kernels are compiled with -fsanitize=thread, which calls __tsan_read4(address) and the like before every access to
// memory. Those calls are answered here: an access must lie in a block of memory of the device, or in shared memory, and
// two threads that touch the same bytes, one writing, need a barrier between.
#include <link.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#include <vector>

struct dim3_t { unsigned int x, y, z; };
#define LOCAL __attribute__((tls_model("initial-exec"))) thread_local
extern "C" { LOCAL dim3_t threadIdx, blockIdx, blockDim, gridDim; }

namespace {

const size_t STACK = 256 << 10;
enum State { READY, AT_BLOCK, AT_WARP, FREE };

#if defined(__x86_64__)
struct Context { void* sp; };
extern "C" void switch_stack(void** from, void* to);
__asm__(
    ".text\n.globl switch_stack\n.hidden switch_stack\nswitch_stack:\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
void start_context(Context& c, char* stack, void (*entry)()) {
    void** top = (void**)(stack + STACK);
    *--top = 0;
    *--top = (void*)entry;
    for (int i = 0; i < 6; ++i) *--top = 0;
    c.sp = top;
}
void change(Context& from, Context& to) { switch_stack(&from.sp, to.sp); }
#else
struct Context { ucontext_t c; };
void start_context(Context& c, char* stack, void (*entry)()) {
    getcontext(&c.c);
    c.c.uc_stack.ss_sp = stack;
    c.c.uc_stack.ss_size = STACK;
    c.c.uc_link = 0;
    makecontext(&c.c, entry, 0);
}
void change(Context& from, Context& to) { swapcontext(&from.c, &to.c); }
#endif

struct Fiber {
    Context context;
    char* stack;
    State state;
    unsigned thread;
    unsigned mask;
    int line;
};

struct Block {
    void (*call)(void*, void**);
    void** parameters;
    unsigned threads, next, finished, warps;
    int order;
    unsigned seed;
    std::vector<Fiber*> fibers;
    std::vector<unsigned> sequence;
    std::vector<unsigned> shuffles;
    std::vector<unsigned long long> slots;
    Context scheduler;
    Fiber* running;
    char* dynamic;
    std::vector<unsigned> block_epochs, warp_epochs;
    unsigned long long first_thread;
    char* message;
    size_t room;
    bool failed;
    ~Block() {
        for (Fiber* f : fibers) { munmap(f->stack, STACK); delete f; }
    }
};

thread_local Block block;

struct Cell { unsigned writer, written, reader, read; };  // threads from 1 on, and their epochs
const unsigned MANY_THREADS = 1u << 31, MANY_BLOCKS = 1u << 30, EPOCH = MANY_BLOCKS - 1;
const unsigned ATOMIC = 1u << 31;
const size_t MOST_CELLS = 4u << 20, GRAIN = 16;

struct Range {
    uintptr_t begin, end;
    Cell* cells;
    unsigned char* touched;  // a byte a grain: 1 read, 2 written
};

struct Watch {
    Range* ranges;
    size_t count;
    Range* last;
    Range shared, dynamic;
    bool track, on;
};
LOCAL Watch watch;

void place(unsigned t) {
    threadIdx = {t % blockDim.x, t / blockDim.x % blockDim.y, t / blockDim.x / blockDim.y};
}

void work() {
    for (;;) {
        Block& b = block;
        while (b.next < b.threads) {
            unsigned t = b.sequence[b.next++];
            b.running->thread = t;
            place(t);
            b.call(0, b.parameters);
            b.finished++;
        }
        b.running->state = FREE;
        change(b.running->context, b.scheduler);
    }
}

void resume(Fiber* f) {
    block.running = f;
    f->state = READY;
    place(f->thread);
    change(block.scheduler, f->context);
}

Fiber* free_fiber(size_t index) {
    Block& b = block;
    if (index == b.fibers.size()) {
        Fiber* f = new Fiber;
        f->stack = (char*)mmap(0, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        b.fibers.push_back(f);
    }
    Fiber* f = b.fibers[index];
    start_context(f->context, f->stack, work);
    f->state = READY;
    return f;
}

bool fail(const char* text, unsigned thread, int line) {
    Block& b = block;
    snprintf(b.message, b.room, "%s (block %u,%u,%u; thread %u; line %d)", text, blockIdx.x, blockIdx.y, blockIdx.z, thread,
             line);
    b.failed = true;
    return false;
}

void arrange(unsigned turn) {
    Block& b = block;
    for (unsigned i = 0; i < b.threads; ++i) b.sequence[i] = b.order == 1 ? b.threads - 1 - i : i;
    if (b.order == 2) {
        unsigned long long x = b.seed * 2654435761ull + turn * 40503ull + 88172645463325252ull;
        for (unsigned i = b.threads; i > 1; --i) {
            x ^= x << 13; x ^= x >> 7; x ^= x << 17;
            unsigned j = x % i, held = b.sequence[i - 1];
            b.sequence[i - 1] = b.sequence[j];
            b.sequence[j] = held;
        }
    }
}

bool release_warps(std::vector<Fiber*>& waiting) {
    Block& b = block;
    bool any = false;
    std::vector<std::vector<Fiber*>> warps(b.warps);
    for (Fiber* f : waiting) if (f->state == AT_WARP) warps[f->thread / 32].push_back(f);
    for (unsigned w = 0; w < b.warps; ++w) {
        if (warps[w].empty()) continue;
        unsigned there = 0, full = b.threads - w * 32 >= 32 ? ~0u : (1u << (b.threads - w * 32)) - 1;
        for (Fiber* f : warps[w]) there |= 1u << (f->thread % 32);
        for (Fiber* f : warps[w]) {
            unsigned wanted = f->mask & full;
            if ((f->mask >> (f->thread % 32) & 1) == 0) return fail("a thread is not in the mask of its own warp operation", f->thread, f->line);
            if (wanted & ~there) continue;
            unsigned same = 0;
            for (Fiber* g : warps[w]) if (g->mask == f->mask && g->line == f->line && g->state == AT_WARP) same |= 1u << (g->thread % 32);
            if ((same & wanted) != wanted) continue;
            for (Fiber* g : warps[w]) if (wanted >> (g->thread % 32) & 1) g->state = READY;
            any = true;
        }
    }
    return any;
}

bool run_one_block() {
    Block& b = block;
    b.next = b.finished = 0;
    b.failed = false;
    arrange(0);
    std::vector<Fiber*> waiting;
    while (b.next < b.threads) {
        Fiber* f = free_fiber(waiting.size());
        resume(f);
        if (b.failed) return false;
        if (f->state != FREE) waiting.push_back(f);
    }
    for (unsigned turn = 1; !waiting.empty(); ++turn) {
        bool released = release_warps(waiting);
        if (b.failed) return false;
        if (!released) {
            for (Fiber* f : waiting)
                if (f->state == AT_WARP)
                    return fail("a warp operation waits for threads of its mask that left or are elsewhere", f->thread, f->line);
            if (b.finished) return fail("a thread waits in __syncthreads() that others of its block left without", waiting[0]->thread, waiting[0]->line);
            for (Fiber* f : waiting) {
                if (f->line != waiting[0]->line) return fail("threads of one block wait in different __syncthreads()", f->thread, f->line);
                f->state = READY;
            }
        }
        arrange(turn);
        std::vector<Fiber*> of_thread(b.threads, nullptr), left;
        for (Fiber* f : waiting) of_thread[f->thread] = f;
        std::vector<unsigned> now = b.sequence;
        for (unsigned t : now) {
            Fiber* f = of_thread[t];
            if (!f) continue;
            if (f->state == READY) resume(f);
            if (b.failed) return false;
            if (f->state != FREE) left.push_back(f);
        }
        waiting = left;
    }
    return true;
}

Cell* new_cells(size_t bytes) {
    void* found = mmap(0, bytes * sizeof(Cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return found == MAP_FAILED ? 0 : (Cell*)found;
}

__attribute__((noinline)) void stop(const char* text, uintptr_t a, size_t size, const Range* range) {
    Block& b = block;
    if (!b.failed) {
        fail(text, b.running->thread, 0);
        size_t used = strlen(b.message);
        if (range)
            snprintf(b.message + used, b.room - used, ": %zu bytes at byte %zd of %zu", size, (ssize_t)(a - range->begin),
                     (size_t)(range->end - range->begin));
        else
            snprintf(b.message + used, b.room - used, ": %zu bytes at address 0x%zx", size, (size_t)a);
    }
    b.running->state = AT_BLOCK;
    change(b.running->context, b.scheduler);  // nobody comes back
}

// True when what thread `other` did at `epoch` is before what the running one does.
inline bool before(unsigned other, unsigned epoch, unsigned own) {
    Block& b = block;
    unsigned long long first = b.first_thread;
    if (other <= first || other > first + b.threads) return false;
    unsigned theirs = other - first - 1, mine = own - first - 1;
    if ((epoch >> 15) < (b.block_epochs[mine] & 0x7fff)) return true;
    return theirs / 32 == mine / 32 && (epoch & 0x7fff) < (b.warp_epochs[mine] & 0x7fff);
}

inline bool of_this_block(unsigned other) {
    return other > block.first_thread && other <= block.first_thread + block.threads;
}

enum Kind { READS = 0, WRITES = 1, ATOMICALLY = 2 };

void visit(Range& r, uintptr_t a, size_t size, Kind kind, bool shared) {
    Block& b = block;
    unsigned t = b.running->thread, own = (unsigned)(b.first_thread + t + 1);
    unsigned epoch = (b.block_epochs[t] & 0x7fff) << 15 | (b.warp_epochs[t] & 0x7fff);
    size_t unit = size < 4 ? size : 4;
    for (size_t at = a - r.begin, end = at + size; at < end; at += unit) {
        Cell& c = r.cells[at];
        bool stale_writer = shared && !of_this_block(c.writer & ~ATOMIC);
        if (c.writer && !stale_writer) {
            bool atomics = (c.writer & ATOMIC) && kind == ATOMICALLY;
            unsigned other = c.writer & ~ATOMIC;
            if (other != own && !atomics && !before(other, c.written, own))
                return stop(kind == READS ? "a thread reads what another wrote, with no barrier between"
                                          : "two threads write the same bytes, with no barrier between", a, size, &r);
        } else if (shared && kind != WRITES) {
            return stop("shared memory is read that nobody wrote", a, size, &r);
        }
        if (kind == READS) {
            unsigned flags = 0;
            if (c.reader && !(shared && !of_this_block(c.reader))) {
                flags = c.read & (MANY_THREADS | MANY_BLOCKS);
                if (c.reader != own) flags |= MANY_THREADS;
                if (!of_this_block(c.reader)) flags |= MANY_BLOCKS;
                if (c.reader != own && before(c.reader, c.read & EPOCH, own)) flags &= ~MANY_THREADS;
            }
            c.reader = own;
            c.read = epoch | flags;
        } else {
            if (c.reader && !(shared && !of_this_block(c.reader))) {
                bool alone = c.reader == own && !(c.read & (MANY_THREADS | MANY_BLOCKS));
                bool ordered = !(c.read & MANY_BLOCKS) && before(c.reader, c.read & EPOCH, own);
                if (!alone && !ordered)
                    return stop("a thread writes what another read, with no barrier between", a, size, &r);
            }
            c.writer = own | (kind == ATOMICALLY ? ATOMIC : 0);
            c.written = epoch;
            c.reader = 0;
            c.read = 0;
        }
    }
}

__attribute__((noinline)) Range* find(uintptr_t a) {
    Watch& w = watch;
    size_t low = 0, high = w.count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (w.ranges[middle].end <= a) low = middle + 1;
        else high = middle;
    }
    if (low == w.count || a < w.ranges[low].begin) return 0;
    Range* r = &w.ranges[low];
    size_t size = r->end - r->begin;
    if (!r->cells && size <= MOST_CELLS) r->cells = new_cells(size);
    if (w.track && !r->touched) r->touched = (unsigned char*)calloc(size / GRAIN + 2, 1);
    w.last = r;
    return r;
}

inline void access(uintptr_t a, size_t size, Kind kind) {
    Watch& w = watch;
    if (!w.on) return;
    if (w.last && a >= w.last->begin && a + size <= w.last->end) {
    } else if (a - w.shared.begin < w.shared.end - w.shared.begin) {
        if (w.shared.cells) visit(w.shared, a, size, kind, true);
        return;
    } else if (a - w.dynamic.begin < w.dynamic.end - w.dynamic.begin + 256) {
        if (a + size > w.dynamic.end) return stop("an access beyond the dynamic shared memory of the launch", a, size, &w.dynamic);
        visit(w.dynamic, a, size, kind, true);
        return;
    } else {
        uintptr_t here = (uintptr_t)__builtin_frame_address(0);
        if (a - (here - STACK) < 2 * STACK || a - (uintptr_t)&threadIdx < sizeof(dim3_t) ||
            a - (uintptr_t)&blockIdx < sizeof(dim3_t) || a - (uintptr_t)&blockDim < sizeof(dim3_t) ||
            a - (uintptr_t)&gridDim < sizeof(dim3_t) || !w.ranges)
            return;
        Range* r = find(a);
        if (!r || a + size > r->end) {
            return stop(kind == READS ? "a read of memory that is not the device's" : "a write to memory that is not the device's", a, size, r);
        }
    }
    Range* r = w.last;
    if (r->cells) visit(*r, a, size, kind, false);
    if (r->touched) {
        unsigned char bit = kind == READS ? 1 : 2;
        for (size_t g = (a - r->begin) / GRAIN, end = (a + size - 1 - r->begin) / GRAIN; g <= end; ++g) r->touched[g] |= bit;
    }
}

struct Found { const void* address; size_t module, size; };
int find_library(dl_phdr_info* info, size_t, void* data) {
    Found* found = (Found*)data;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const ElfW(Phdr)& h = info->dlpi_phdr[i];
        const char* begin = (const char*)info->dlpi_addr + h.p_vaddr;
        if (h.p_type == PT_LOAD && begin <= (const char*)found->address && (const char*)found->address < begin + h.p_memsz) {
            for (int j = 0; j < info->dlpi_phnum; ++j)
                if (info->dlpi_phdr[j].p_type == PT_TLS) {
                    found->module = info->dlpi_tls_modid;
                    found->size = info->dlpi_phdr[j].p_memsz;
                }
            return 1;
        }
    }
    return 0;
}
struct tls_index { unsigned long module, offset; };
extern "C" void* __tls_get_addr(tls_index*);

}  // namespace

extern "C" {

void emulated_syncthreads(int line) {
    Fiber* f = block.running;
    f->state = AT_BLOCK;
    f->line = line;
    change(f->context, block.scheduler);
    block.block_epochs[f->thread]++;
}

void emulated_syncwarp(unsigned mask, int line) {
    Fiber* f = block.running;
    f->state = AT_WARP;
    f->mask = mask;
    f->line = line;
    change(f->context, block.scheduler);
    block.warp_epochs[f->thread]++;
}

unsigned long long* emulated_slots() {
    // Two sets of slots in turn, so that a thread that is ahead does not overwrite what another is yet to read.
    Block& b = block;
    unsigned t = b.running->thread;
    return &b.slots[((b.shuffles[t]++ & 1) * b.warps + t / 32) * 32];
}

unsigned emulated_thread() { return block.running->thread; }
unsigned emulated_threads() { return block.threads; }
void* emulated_dynamic_shared() { return block.dynamic; }

// What a launch may touch, as begin and end of each block in order, and what it did touch.
struct Memory {
    const unsigned long long* bounds;
    unsigned long count;
    int track;
    unsigned long long* found;  // index of the block, begin, end, written
    unsigned long most, number;
};

// 0, or 1 with a message. The shared variables of a block begin as rubbish.
int run_blocks(void (*call)(void*, void**), void** parameters, const unsigned* grid, const unsigned* size,
               unsigned shared_bytes, int order, unsigned seed, Memory* memory, char* message, unsigned long room) {
    Block& b = block;
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {size[0], size[1], size[2]};
    b.call = call;
    b.parameters = parameters;
    b.threads = size[0] * size[1] * size[2];
    b.warps = (b.threads + 31) / 32;
    b.order = order;
    b.seed = seed;
    b.sequence.resize(b.threads);
    b.shuffles.assign(b.threads, 0);
    b.slots.assign(b.warps * 64, 0xa5a5a5a5a5a5a5a5ull);
    b.message = message;
    b.room = room;
    std::vector<char> dynamic(shared_bytes + 512);
    b.dynamic = (char*)(((uintptr_t)dynamic.data() + 127) / 128 * 128);
    Found found = {(const void*)call, 0, 0};
    dl_iterate_phdr(find_library, &found);
    char* shared = 0;
    if (found.size) {
        tls_index at = {found.module, 0};
        shared = (char*)__tls_get_addr(&at);
    }
    std::vector<Range> ranges(memory ? memory->count : 0);
    for (size_t i = 0; i < ranges.size(); ++i)
        ranges[i] = {(uintptr_t)memory->bounds[2 * i], (uintptr_t)memory->bounds[2 * i + 1], 0, 0};
    uintptr_t at_shared = (uintptr_t)shared, at_dynamic = (uintptr_t)b.dynamic;
    watch = {memory ? ranges.data() : 0, ranges.size(), 0,
             {at_shared, at_shared + (shared ? found.size : 0), shared ? new_cells(found.size + 64) : 0, 0},
             {at_dynamic, at_dynamic + shared_bytes, shared_bytes ? new_cells(shared_bytes + 64) : 0, 0},
             memory && memory->track, true};
    int status = 0;
    unsigned long long count = (unsigned long long)grid[0] * grid[1] * grid[2];
    for (unsigned long long i = 0; i < count && !status; ++i) {
        unsigned long long n = order == 1 ? count - 1 - i : i;
        blockIdx = {(unsigned)(n % grid[0]), (unsigned)(n / grid[0] % grid[1]), (unsigned)(n / grid[0] / grid[1])};
        b.first_thread = n * b.threads;
        b.block_epochs.assign(b.threads, 0);  // they have 15 bits, and count for one block
        b.warp_epochs.assign(b.threads, 0);
        if (shared) memset(shared, 0xa5, found.size);
        memset(dynamic.data(), 0xa5, dynamic.size());
        status = !run_one_block();
    }
    watch.on = false;
    if (memory) memory->number = 0;
    for (size_t i = 0; i < ranges.size(); ++i) {
        Range& r = ranges[i];
        size_t bytes = r.end - r.begin;
        if (r.cells) munmap(r.cells, bytes * sizeof(Cell));
        if (!r.touched) continue;
        for (int bit = 1; bit <= 2; ++bit) {
            size_t grains = bytes / GRAIN + 1;
            for (size_t g = 0; g < grains;) {
                if (!(r.touched[g] & bit)) { ++g; continue; }
                size_t begin = g;
                while (g < grains && (r.touched[g] & bit)) ++g;
                uintptr_t from = r.begin + begin * GRAIN, to = r.begin + g * GRAIN;
                if (to > r.end) to = r.end;
                if (memory->number == memory->most) {  // no room: all up to here is one
                    memory->found[4 * (memory->number - 1) + 2] = to;
                    continue;
                }
                unsigned long long* one = memory->found + 4 * memory->number++;
                one[0] = i; one[1] = from; one[2] = to; one[3] = bit == 2;
            }
        }
        free(r.touched);
    }
    if (watch.shared.cells) munmap(watch.shared.cells, (found.size + 64) * sizeof(Cell));
    if (watch.dynamic.cells) munmap(watch.dynamic.cells, (shared_bytes + 64) * sizeof(Cell));
    watch = Watch();
    return status;
}

void emulated_atomic(const void* a, unsigned size) { access((uintptr_t)a, size, ATOMICALLY); }

void __tsan_init() {}
void __tsan_atomic_thread_fence(int) {}
#define ACCESSES(n) \
    void __tsan_read##n(void* a) { access((uintptr_t)a, n, READS); } \
    void __tsan_write##n(void* a) { access((uintptr_t)a, n, WRITES); } \
    void __tsan_unaligned_read##n(void* a) { access((uintptr_t)a, n, READS); } \
    void __tsan_unaligned_write##n(void* a) { access((uintptr_t)a, n, WRITES); }
ACCESSES(1) ACCESSES(2) ACCESSES(4) ACCESSES(8) ACCESSES(16)
void __tsan_read_range(void* a, unsigned long n) { access((uintptr_t)a, n, READS); }
void __tsan_write_range(void* a, unsigned long n) { access((uintptr_t)a, n, WRITES); }

}
