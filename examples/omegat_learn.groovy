/* :name=Teach the translation server :description=Posts each segment to the server when its translation is confirmed
 *
 * Save this file in the folder application_startup of OmegaT's folder of scripts (create it), and start OmegaT again.
 * OmegaT has no mark for "confirmed": a segment is posted when it is left, or the project saved, with another
 * translation than it was entered with. So machine output that was inserted and left as it was is posted as well:
 * insert only what you read. Segments with tags are left out. OmegaT does not wait for the server; what the server
 * refuses is told in OmegaT's log.
 */
import java.util.concurrent.ExecutorService
import java.util.concurrent.Executors
import org.omegat.core.Core
import org.omegat.core.CoreEvents
import org.omegat.core.data.SourceTextEntry
import org.omegat.core.events.IEntryEventListener
import org.omegat.core.events.IProjectEventListener
import org.omegat.util.Log

class Learning implements IEntryEventListener, IProjectEventListener {
    static final String SERVER = "http://127.0.0.1:5000"
    static final String API_KEY = "" // of the server, if it asks for one
    static final String MEMORY = ""  // the name of one of its memories, if it has several

    final ExecutorService posting = Executors.newSingleThreadExecutor { work ->
        def thread = new Thread(work, "learning")
        thread.daemon = true
        thread
    }
    SourceTextEntry entry
    String before

    void onNewFile(String name) {}

    void onEntryActivated(SourceTextEntry next) {
        leave()
        entry = next
        before = translation(next)
    }

    void onProjectChanged(IProjectEventListener.PROJECT_CHANGE_TYPE change) {
        if (change == IProjectEventListener.PROJECT_CHANGE_TYPE.SAVE) { // as before it is closed
            leave()
        } else if (change == IProjectEventListener.PROJECT_CHANGE_TYPE.CLOSE) {
            entry = null
        }
    }

    void leave() {
        String source = entry?.srcText, now = translation(entry)
        if (now && now != before && !entry.protectedParts) {
            posting.execute { post(q: source, s: now, api_key: API_KEY, memory: MEMORY) }
            before = now
        }
    }

    static String translation(SourceTextEntry entry) {
        def info = entry == null ? null : Core.project.getTranslationInfo(entry)
        info?.isTranslated() ? info.translation : null
    }

    static void post(Map<String, String> fields) {
        try {
            def body = fields.collect { name, value -> name + "=" + URLEncoder.encode(value, "UTF-8") }.join("&")
            def connection = (HttpURLConnection) new URL(SERVER + "/learn").openConnection()
            connection.doOutput = true
            connection.connectTimeout = connection.readTimeout = 60000
            connection.outputStream.withStream { it << body.getBytes("UTF-8") }
            if (connection.responseCode != 200) {
                Log.log("not learned: " + fields.q + ": " + connection.errorStream?.getText("UTF-8"))
            }
        } catch (IOException error) {
            Log.log("not learned: " + fields.q + ": " + error)
        }
    }
}

def learning = new Learning()
CoreEvents.registerEntryEventListener(learning)
CoreEvents.registerProjectChangeListener(learning)
