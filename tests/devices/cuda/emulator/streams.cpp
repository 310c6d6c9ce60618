/* Streams, events and graphs of an emulated card: one worker thread a stream, work in order, nothing of Python's.
 *
 * A graph is the work that was captured, one item after the other; streams that join a capture through events add
 * theirs where they are asked, which is an order that the card could have taken, too.  After a kernel has failed the
 * card answers nothing but that code, as a real one does.
 */
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "abi.h"

namespace {

struct Work {
    std::function<int(char *message)> run; /* anything but a kernel */
    Launch launch{};
    bool early = false;
    std::vector<char> values; /* of the kernel's parameters */
    std::vector<void *> arguments;
};
using Item = std::shared_ptr<Work>;
using Items = std::vector<Item>;

struct Graph {
    Items items;
    bool ended = false; /* nothing joins its capture any more */
};

struct Card {
    std::atomic<int> code{0};
    std::mutex mutex;
    char message[MESSAGE_BYTES] = "";

    void fail(int c, const char *text)
    {
        std::lock_guard<std::mutex> held(mutex);
        int none = 0;
        if (code.compare_exchange_strong(none, c)) {
            snprintf(message, sizeof message, "%s", text);
            fprintf(stderr, "emulator: %s\n", text);
        }
    }
};

struct Stream {
    Card *card;
    std::mutex mutex;
    std::condition_variable changed;
    Items queue;
    bool busy = false, ends = false;
    std::shared_ptr<Graph> capture;
    std::thread worker;

    explicit Stream(Card *c) : card(c), worker([this] { work(); }) {}

    ~Stream()
    {
        {
            std::lock_guard<std::mutex> held(mutex);
            ends = true;
        }
        changed.notify_all();
        worker.join();
    }

    int add(Items items)
    {
        if (capture) {
            capture->items.insert(capture->items.end(), items.begin(), items.end());
            return CODE_SUCCESS;
        }
        if (int code = card->code)
            return code;
        {
            std::lock_guard<std::mutex> held(mutex);
            queue.insert(queue.end(), items.begin(), items.end());
        }
        changed.notify_all();
        return CODE_SUCCESS;
    }

    int synchronize()
    {
        std::unique_lock<std::mutex> held(mutex);
        changed.wait(held, [this] { return queue.empty() && !busy; });
        return card->code;
    }

    int query()
    {
        std::lock_guard<std::mutex> held(mutex);
        return queue.empty() && !busy ? card->code.load() : card->code ? card->code.load() : (int)CODE_NOT_READY;
    }

    void work()
    {
        std::unique_lock<std::mutex> held(mutex);
        for (;;) {
            changed.wait(held, [this] { return !queue.empty() || ends; });
            if (queue.empty())
                return;
            Items items;
            items.swap(queue);
            busy = true;
            held.unlock();
            run(items);
            held.lock();
            busy = false;
            changed.notify_all();
        }
    }

    void run(const Items &items)
    {
        char message[MESSAGE_BYTES] = "";
        for (size_t i = 0; i < items.size() && !card->code;) {
            if (items[i]->run) {
                if (int code = items[i]->run(message))
                    card->fail(code, message);
                i++;
                continue;
            }
            std::vector<Launch> chain{items[i]->launch}; /* with those behind it that may start early */
            while (++i < items.size() && items[i]->early && items[i]->launch.kernel &&
                   items[i]->launch.kernel->run == chain[0].kernel->run)
                chain.push_back(items[i]->launch);
            if (int code = chain[0].kernel->run(chain.data(), (int)chain.size(), message))
                card->fail(code, message);
        }
    }
};

struct Event {
    std::mutex mutex;
    std::condition_variable changed;
    unsigned long long asked = 0, reached = 0;
    std::shared_ptr<Graph> capture; /* where it was recorded while a graph was being captured */
};

Items one(std::function<int(char *)> run)
{
    auto work = std::make_shared<Work>();
    work->run = std::move(run);
    return {work};
}

int wait_for(Event *event, unsigned long long ticket)
{
    std::unique_lock<std::mutex> held(event->mutex);
    event->changed.wait(held, [=] { return event->reached >= ticket; });
    return CODE_SUCCESS;
}

} // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT Card *emulator_card() { return new Card; }
EXPORT void emulator_card_close(Card *card) { delete card; }
EXPORT int emulator_code(Card *card) { return card->code; }
EXPORT const char *emulator_message(Card *card) { return card->message; }

EXPORT Stream *emulator_stream(Card *card) { return new Stream(card); }
EXPORT void emulator_stream_close(Stream *stream) { delete stream; }
EXPORT int emulator_synchronize(Stream *stream) { return stream->synchronize(); }
EXPORT int emulator_query(Stream *stream) { return stream->query(); }

EXPORT int emulator_launch(Stream *stream, const Kernel *kernel, const unsigned *dimensions, unsigned shared_bytes,
                           void *const *arguments, int early)
{
    auto work = std::make_shared<Work>();
    int total = 0;
    for (int i = 0; i < kernel->n_parameters; i++)
        total += (kernel->sizes[i] + 15) / 16 * 16;
    work->values.resize(total + 16);
    char *at = work->values.data() + (16 - (size_t)work->values.data() % 16) % 16;
    for (int i = 0; i < kernel->n_parameters; i++) {
        memcpy(at, arguments[i], kernel->sizes[i]);
        work->arguments.push_back(at);
        at += (kernel->sizes[i] + 15) / 16 * 16;
    }
    work->early = early;
    const unsigned *d = dimensions;
    work->launch = {kernel, {d[0], d[1], d[2]}, {d[3], d[4], d[5]}, shared_bytes, work->arguments.data()};
    return stream->add({work});
}

EXPORT int emulator_copy(Stream *stream, void *to, const void *from, size_t n)
{
    return stream->add(one([=](char *) { return memcpy(to, from, n), 0; }));
}

/* n values of `width` bytes */
EXPORT int emulator_set(Stream *stream, void *to, unsigned value, size_t n, int width)
{
    return stream->add(one([=](char *) {
        for (size_t i = 0; i < n; i++)
            memcpy((char *)to + i * width, &value, width);
        return 0;
    }));
}

EXPORT int emulator_host_function(Stream *stream, void (*function)(void *), void *data)
{
    return stream->add(one([=](char *) { return function(data), 0; }));
}

/* ---- events */

EXPORT Event *emulator_event() { return new Event; }
EXPORT void emulator_event_close(Event *event) { delete event; }

EXPORT int emulator_record(Event *event, Stream *stream)
{
    event->capture = stream->capture;
    if (stream->capture)
        return CODE_SUCCESS; /* what was captured so far comes before whatever will be */
    unsigned long long ticket;
    {
        std::lock_guard<std::mutex> held(event->mutex);
        ticket = ++event->asked;
    }
    return stream->add(one([=](char *) {
        std::lock_guard<std::mutex> held(event->mutex);
        event->reached = ticket;
        event->changed.notify_all();
        return 0;
    }));
}

EXPORT int emulator_wait(Stream *stream, Event *event)
{
    if (event->capture) {
        if (event->capture->ended)
            return CODE_INVALID_VALUE;
        stream->capture = event->capture;
        return CODE_SUCCESS;
    }
    unsigned long long ticket = event->asked;
    return stream->add(one([=](char *) { return wait_for(event, ticket); }));
}

EXPORT int emulator_event_synchronize(Event *event, Card *card)
{
    std::unique_lock<std::mutex> held(event->mutex);
    while (event->reached < event->asked) { /* work behind a failed kernel is never reached */
        if (card->code)
            return card->code;
        event->changed.wait_for(held, std::chrono::milliseconds(5));
    }
    return card->code;
}

/* ---- graphs */

EXPORT int emulator_begin_capture(Stream *stream)
{
    if (stream->capture)
        return CODE_INVALID_VALUE;
    stream->capture = std::make_shared<Graph>();
    return CODE_SUCCESS;
}

/* Streams: all of the card's, since others may have joined. */
EXPORT Graph *emulator_end_capture(Stream *stream, Stream *const *streams, int n)
{
    auto graph = stream->capture;
    for (int i = 0; i < n; i++)
        if (streams[i]->capture == graph)
            streams[i]->capture.reset();
    if (!graph)
        return nullptr;
    graph->ended = true;
    return new Graph(*graph);
}

EXPORT void emulator_graph_close(Graph *graph) { delete graph; }
EXPORT int emulator_graph_size(Graph *graph) { return (int)graph->items.size(); }
EXPORT int emulator_graph_launch(Graph *graph, Stream *stream) { return stream->add(graph->items); }
